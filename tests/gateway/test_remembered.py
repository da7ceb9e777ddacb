"""Answers of the database that take long are waited for once."""

import threading
from types import SimpleNamespace

import pytest

from gateway.telemetry import remembered
from gateway.telemetry.remembered import Remembered


@pytest.mark.timeout(45)
async def test_who_comes_late_does_not_wait_for_the_first_answer(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(remembered, "time", SimpleNamespace(monotonic=lambda: now[0]))
    there = threading.Event()

    def ask() -> str:
        there.wait(5)
        return "answer"

    question = Remembered(ask, 10.0)
    try:
        assert await question.within(0.01) is None
        now[0] = 1_000.0
        # So long ago was it asked: nobody waits for another ten minutes.
        assert await question.within(600.0) is None
    finally:
        there.set()
    assert await question.get() == "answer"
    assert await question.within(0.01) == "answer"
