"""Which tokens of a row are the answer: the conversation is rendered once and tokenised once, spans decide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subspan.errors import DataError
from subspan.surgery.answers import IGNORED

Message = Mapping[str, str]

# The usual names of the user's turn, of what goes with it, and of the answer; the likeliest first.
_PROMPTS = ("prompt", "instruction", "question", "text")
_CONTEXTS = ("context", "input")
_ANSWERS = ("answer", "response", "output", "completion", "label")


@dataclass(frozen=True)
class Tokens:
    """A row as the model reads it; ``reason`` says why a row has no target."""

    input_ids: list[int]
    labels: list[int]
    reason: str = ""


def row_tokens(
    row: Mapping[str, Any],
    number: int,
    tokenizer: Any,
    max_length: int = 1024,
    *,
    last_turn_only: bool = False,
    prompt: str | None = None,
    answer: str | None = None,
) -> Tokens:
    """Tokens of a row, or what it brings as ``input_ids`` and ``labels``; see ``conversation`` and ``tokenise``.

    Raises:
        DataError: as those two do.
        ValueError: a row of text without a tokenizer.
    """
    if is_encoded(row):
        targets = any(label != IGNORED for label in row["labels"][1:])
        return Tokens(row["input_ids"], row["labels"], "" if targets else "no token of an answer")
    if tokenizer is None:
        raise ValueError("rows of text need the tokenizer of the model: give tokenizer=")
    return tokenise(tokenizer, conversation(row, number, prompt, answer), number, max_length, last_turn_only)


def is_encoded(row: Mapping[str, Any]) -> bool:
    return "input_ids" in row and "labels" in row


def conversation(row: Mapping[str, Any], number: int, prompt: str | None = None, answer: str | None = None) -> list:
    """The messages of a row: its column ``messages``, or a user's turn and an answer from two columns.

    Args:
        row: a row of the data set.
        number: what an error calls the row.
        prompt: the column with the user's turn (found by its usual names when left out).
        answer: the column with the answer (found by its usual names when left out).

    Raises:
        DataError: no such column, or messages that are not role and content.
    """
    if prompt is None and answer is None and row.get("messages") is not None:
        turns = row["messages"]
        if not turns or not all(isinstance(t, Mapping) and {"role", "content"} <= set(t) for t in turns):
            raise DataError(f"row {number}: messages should be a list of objects with role and content")
        return [{"role": t["role"], "content": t["content"] or ""} for t in turns]
    asked = row[_column(row, prompt, _PROMPTS, "prompt")]
    context = next((row[name] for name in _CONTEXTS if row.get(name)), None) if prompt is None else None
    said = row[_column(row, answer, _ANSWERS, "answer")]
    return [
        {"role": "user", "content": f"{asked}\n\n{context}" if context else str(asked)},
        {"role": "assistant", "content": "" if said is None else str(said)},
    ]


def _column(row: Mapping[str, Any], wanted: str | None, usual: Sequence[str], what: str) -> str:
    found = [name for name in ([wanted] if wanted else usual) if name in row]
    if not found:
        asked = f"no column {wanted!r}" if wanted else f"no column is called messages or {', '.join(usual)}"
        raise DataError(f"{asked}; name the column of the {what} (columns are: {', '.join(row)})")
    return found[0]


def tokenise(
    tokenizer: Any, messages: Sequence[Message], number: int, max_length: int = 1024, last_turn_only: bool = False
) -> Tokens:
    """Tokens of a conversation, with the assistant's turns and their end marks as targets.

    A row longer than ``max_length`` loses the beginning of its prompt first, then the end of its answer. A row that has
    no target left says why.

    Raises:
        DataError: the row cannot be split into prompt and answer with certainty; the message names it.
    """
    turns = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
    if last_turn_only:
        turns = turns[-1:]
    if not any(messages[k]["content"].strip() for k in turns):
        return Tokens([], [], "the answer is empty" if turns else "no turn of the assistant")
    text, spans = _rendered(tokenizer, messages, turns, number)
    ids, inside = _marked(tokenizer, text, spans, number)
    first = inside.index(True) if any(inside) else len(ids)
    # One token in front stays: the first target needs something to follow.
    cut = min(max(len(ids) - max_length, 0), max(first - 1, 0))
    ids, inside = ids[cut : cut + max_length], inside[cut : cut + max_length]
    labels = [token if target and place else IGNORED for place, (token, target) in enumerate(zip(ids, inside))]  # noqa: B905
    kept = any(label != IGNORED for label in labels)
    return Tokens(ids, labels, "" if kept else f"no token of the answer fits into {max_length}")


def _rendered(
    tokenizer: Any, messages: Sequence[Message], turns: Sequence[int], number: int
) -> tuple[str, list[tuple[int, int]]]:
    """The whole conversation as the model reads it, and where each of these turns of the assistant stands in it."""
    if not tokenizer.chat_template:
        return _plain(tokenizer, messages, turns)

    def render(upto: int, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(list(messages[:upto]), tokenize=False, add_generation_prompt=prompt)

    whole, spans = render(len(messages)), []
    for k in turns:
        before, content = render(k, prompt=True), messages[k]["content"].strip()
        # A template may write more into a turn while it is the last one, so only what follows the answer is read off.
        alone = render(k + 1)
        mark = alone[alone.find(content, len(before)) + len(content) :].rstrip()
        end = whole.find(content, len(before)) + len(content)
        if not whole.startswith(before) or end < len(before) + len(content) or not whole.startswith(mark, end):
            raise DataError(
                f"row {number}: this model's chat template does not put turn {k + 1} after its generation prompt, so "
                "that its tokens cannot be told from the prompt's"
            )
        spans.append((len(before), end + len(mark)))
    return whole, spans


def _plain(tokenizer: Any, messages: Sequence[Message], turns: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """For a model without a chat template: turns apart by blank lines, an answer after a space, with the end mark."""
    text, spans = tokenizer.bos_token or "", []
    for k, message in enumerate(messages):
        answer = message["role"] == "assistant"
        begin = len(text)
        text += f" {message['content']}{tokenizer.eos_token}" if answer else ("\n\n" * (k > 0)) + message["content"]
        if k in turns:
            spans.append((begin, len(text)))
    return text, spans


def _marked(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], number: int) -> tuple[list[int], list[bool]]:
    """Token ids, and which of them begin inside a span."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], [any(a <= at < b for a, b in spans) for at, _ in encoded["offset_mapping"]]
    # Without offsets: what stands before and up to each span must tokenise to the beginning of the whole.
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    inside = [False] * len(ids)
    for span in spans:
        ends = [tokenizer(text[:at], add_special_tokens=False)["input_ids"] for at in span]
        if any(ids[: len(part)] != part for part in ends):
            raise DataError(
                f"row {number}: this tokenizer gives no offsets, and the tokens of the prompt alone are not the first "
                "ones of the whole; use a fast tokenizer"
            )
        inside[len(ends[0]) : len(ends[1])] = [True] * (len(ends[1]) - len(ends[0]))
    return ids, inside
