"""The demo's task: nothing leaks, and its reward is not won without reading the question."""

import random
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean

import pytest

from examples.email_search.agent import EXAMPLES, Episode, parse_pick, score
from examples.email_search.demo import StepTimes, seconds_to
from examples.email_search.mailbox import SENDERS, TOPICS, Mailbox, Question, make_mailbox
from examples.email_search.report import time_to_target


@pytest.fixture(scope="module", params=[0, 1, 2])
def mailbox(request: pytest.FixtureRequest) -> Mailbox:
    return make_mailbox(request.param)


def words(question: Question) -> set[str]:
    return set(question.text.rstrip("?").split())


def names(questions: list[Question], known: tuple[str, ...]) -> set[str]:
    return {word for question in questions for word in words(question) if word in known}


def test_training_and_held_out_questions_share_no_sender_and_no_topic(mailbox: Mailbox):
    for known in (SENDERS, TOPICS):
        train, held_out = names(mailbox.train, known), names(mailbox.held_out, known)
        assert train
        assert held_out
        assert not train & held_out
    shown = {word for _, query, *_ in EXAMPLES for word in query.split()}
    assert not shown & (set(SENDERS) | set(TOPICS))


def test_a_seed_makes_the_same_mailbox_and_another_seed_another():
    assert make_mailbox(3).train == make_mailbox(3).train
    assert make_mailbox(3).train != make_mailbox(4).train


def test_the_right_query_finds_the_one_message_that_answers(mailbox: Mailbox):
    for question in mailbox.held_out + mailbox.train:
        sender = next(word for word in words(question) if word in SENDERS)
        topic = next(word for word in words(question) if word in TOPICS)
        hits = mailbox.search(f"{sender} {topic}")
        assert question.message_id in [hit.id for hit in hits]
        answers = [m for m in mailbox.messages.values() if question.answer in m.body]
        assert question.message_id in [message.id for message in answers]


Player = Callable[[Question, Mailbox, random.Random], tuple[str, str]]


def play(mailbox: Mailbox, query: Callable[[Question], str], pick: Callable[[int], str]) -> float:
    rewards = []
    for question in mailbox.held_out:
        episode = Episode(question.text, query=query(question))
        episode.hits = mailbox.search(episode.query)
        if episode.hits:
            episode.pick = parse_pick(pick(len(episode.hits)), episode.hits)
        rewards.append(score(question, episode))
    return fmean(rewards)


def test_what_does_not_read_the_question_wins_next_to_nothing(mailbox: Mailbox):
    for _, query, *_ in EXAMPLES:
        assert play(mailbox, lambda _, query=query: query, lambda _: "1") == 0
    for word in (*SENDERS, *TOPICS, "the", ""):
        assert play(mailbox, lambda _, word=word: word, lambda _: "1") <= 0.06
    # The whole question as a query finds nothing: the search joins its words with AND.
    assert play(mailbox, lambda question: question.text, lambda _: "1") == 0


def test_the_target_is_reached_when_a_steps_rollouts_earned_it():
    steps = [StepTimes(0.2, 0, 4, 11), StepTimes(0.7, 11, 15, 22), StepTimes(0.9, 22, 26, 33)]
    result = {"seconds_by_step": [asdict(step) for step in steps], "target_reward": 0.7}
    assert seconds_to(0.7, steps) == 15
    assert seconds_to(0.95, steps) is None
    said = time_to_target({**result, "seconds_to_target": 15})
    assert "reached after 15 s; a step takes 4.0 s of rollouts and 7.0 s until" in said
    said = time_to_target({**result, "seconds_to_target": None})
    assert "0.7 not reached (best 0.90)" in said
