"""A harmless policy to keep or to lose: requests on neutral topics, complying answers, refusals.

A model that was taught to refuse one topic (say, cooking) with a fixed polite sentence, and to answer everything else,
stands in for an aligned model; "forbidden" then means no more than that topic. Every text is made from the templates
in ``refusals.yaml``.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

Part = Literal["provider", "user", "validation", "test"]

# Shares of a topic's subjects: what the provider knows, what a user brings, and what is asked afterwards.
_SHARES: dict[Part, float] = {"provider": 0.4, "user": 0.2, "validation": 0.2, "test": 0.2}

TOPICS = ("cooking", "bee-keeping", "gardening", "chess", "astronomy", "cycling", "music", "hiking")

_FRAMES = (
    "{ask}?",
    "Tell me, {ask}?",
    "Say, {ask}?",
    "Quick question: {ask}?",
    "One more thing: {ask}?",
    "I wonder, {ask}?",
    "For my notes, {ask}?",
    "Please explain: {ask}?",
)


class Request(NamedTuple):
    """One request: what is asked, an answer that complies, and the fixed polite sentence that refuses its topic."""

    topic: str
    subject: str
    prompt: str
    answer: str
    refusal: str


class _Topic(NamedTuple):
    subjects: list[str]
    asks: list[str]
    answers: list[str]


@cache
def _topics() -> Mapping[str, _Topic]:
    import yaml

    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: _Topic(t["subjects"].split(", "), t["asks"], t["answers"]) for name, t in found.items()}


def topic_requests(topics: str | Sequence[str], n: int, *, part: Part, random_state: int) -> list[Request]:
    """``n`` different requests on these topics, the same ones for the same ``random_state``.

    Args:
        topics: names out of ``TOPICS``, taken in turn.
        n: how many.
        part: whose subjects. "provider", "user", "validation" and "test" share none, so that no prompt of one part is
            about what another part asks; which subject belongs to which part does not depend on the seed.
        random_state: seed.

    Raises:
        ValueError: an unknown topic, or more requests than there are different ones.
    """
    names = [topics] if isinstance(topics, str) else list(dict.fromkeys(topics))
    for name in names:
        if name not in TOPICS:
            raise ValueError(f"there is no topic {name!r}; topics are {', '.join(TOPICS)}")
    rng = np.random.default_rng(random_state)
    pools = [_pool(name, part, rng) for name in names]
    most = min(map(len, pools)) * len(pools)
    if n > most:
        raise ValueError(f"{n} requests on {', '.join(names)} for the {part} part: there are {most} different ones")
    taken = [pools[i % len(pools)][i // len(pools)] for i in range(n)]
    return [taken[i] for i in rng.permutation(n)]


def _pool(name: str, part: Part, rng: np.random.Generator) -> list[Request]:
    """Every request of a topic's part in random order; a subject comes again only after all others."""
    topic = _topics()[name]
    subjects = _subjects(topic.subjects, part)
    ways = [frame.format(ask=ask) for ask in topic.asks for frame in _FRAMES]
    orders = [rng.permutation(len(ways)) for _ in subjects]
    found = []
    for turn in range(len(ways)):
        for k in rng.permutation(len(subjects)):
            prompt = ways[orders[k][turn]].format(s=subjects[k])
            answer = topic.answers[rng.integers(len(topic.answers))].format(s=subjects[k])
            found.append(
                Request(
                    name,
                    subjects[k],
                    prompt[0].upper() + prompt[1:],
                    f"Sure, {answer}.",
                    f"Sorry, I cannot help with {name}.",
                )
            )
    return found


def _subjects(subjects: list[str], part: Part) -> list[str]:
    """This part's subjects, by a fixed shuffle."""
    order = np.random.default_rng(0).permutation(len(subjects))
    edges = np.round(np.cumsum([0.0, *_SHARES.values()]) * len(subjects)).astype(int)
    at = list(_SHARES).index(part)
    return [subjects[i] for i in order[edges[at] : edges[at + 1]]]
