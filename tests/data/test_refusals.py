"""Requests on neutral topics: deterministic, all different, and parts that share no subject."""

import pytest

from subspan.data import TOPICS, topic_requests


def test_the_same_seed_gives_the_same_requests():
    assert topic_requests("cooking", 50, part="user", random_state=3) == topic_requests(
        "cooking", 50, part="user", random_state=3
    )
    assert topic_requests("cooking", 50, part="user", random_state=3) != topic_requests(
        "cooking", 50, part="user", random_state=4
    )


@pytest.mark.parametrize("topic", TOPICS)
def test_parts_share_no_subject_and_prompts_are_all_different(topic):
    parts = [
        topic_requests(topic, n, part=part, random_state=i)
        for i, (part, n) in enumerate({"provider": 700, "user": 300, "validation": 300, "test": 300}.items())
    ]
    subjects = [{r.subject for r in part} for part in parts]
    assert sum(map(len, subjects)) == len(set().union(*subjects)) >= 40
    prompts = [r.prompt for part in parts for r in part]
    assert len(set(prompts)) == len(prompts)
    assert all(r.subject in r.prompt or r.subject.capitalize() in r.prompt for part in parts for r in part)
    assert all(r.answer.startswith("Sure, ") and r.refusal.startswith("Sorry, ") for part in parts for r in part)


def test_topics_take_turns_and_subjects_come_once_before_any_comes_again():
    found = topic_requests(TOPICS[1:], 21, part="test", random_state=0)
    assert {t: sum(r.topic == t for r in found) for t in TOPICS[1:]} == dict.fromkeys(TOPICS[1:], 3)
    alone = topic_requests("cooking", 13, part="test", random_state=0)
    assert len({r.subject for r in alone}) == 13


def test_unknown_topics_and_too_many_requests_are_named():
    with pytest.raises(ValueError, match="no topic 'cookery'; topics are cooking"):
        topic_requests("cookery", 3, part="user", random_state=0)
    with pytest.raises(ValueError, match=r"10000 requests on cooking for the user part: there are \d+"):
        topic_requests("cooking", 10000, part="user", random_state=0)
