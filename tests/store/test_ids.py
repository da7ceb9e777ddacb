"""Identifiers sort by the time they were made, within a millisecond too."""

import time

import pytest

from gateway.store.ids import new_id


def stopped(now: int):
    return lambda: now


def backwards(now: int):
    steps = iter(range(10**6))
    return lambda: now - next(steps)


@pytest.mark.parametrize("clock", [None, stopped, backwards])
def test_each_is_greater_than_the_one_before(monkeypatch, clock):
    if clock:
        monkeypatch.setattr("gateway.store.ids.time.time_ns", clock(time.time_ns()))
    ids = [new_id("chatcmpl-") for _ in range(20_000)]
    assert ids == sorted(set(ids))
    assert {len(item) for item in ids} == {len("chatcmpl-") + 32}


def test_it_begins_with_the_milliseconds_of_now():
    before = time.time_ns() // 1_000_000
    made = int(new_id("")[:12], 16)
    assert before <= made <= time.time_ns() // 1_000_000
