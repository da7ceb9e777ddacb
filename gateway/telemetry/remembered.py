"""An answer of the database that takes long, asked for seldom, by one at a time."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_QUICK = 0.25
"""Seconds that a request waits for an answer that could be had from memory instead."""
_SHARE = 20.0
"""Of all time, at most one part in so many goes into asking."""


class Remembered(Generic[T]):
    """The newest answer to a question.

    Where the question takes long, whoever asks gets the answer before, and a newer one is fetched
    behind it; only the first waits.
    """

    def __init__(self, ask: Callable[[], T], seconds: float):
        """`ask` blocks, and is run in a thread, at most once every `seconds`."""
        self._ask = ask
        self._seconds = seconds
        self._answer: tuple[T] | None = None
        self._took = 0.0
        self._until = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._began = 0.0

    async def get(self) -> T:
        """The answer.

        Raises:
            Exception: whatever `ask` raised, where there is no earlier answer.
        """
        if time.monotonic() >= self._until and self._asking is None:
            self._asking = asyncio.create_task(self._refresh())
            self._began = time.monotonic()
        task = self._asking
        if task is not None and (self._answer is None or self._took < _QUICK):
            # Others wait for the same: one that hangs up must not end it.
            await asyncio.shield(task)
        if self._answer is None:
            return await asyncio.to_thread(self._ask)
        return self._answer[0]

    async def within(self, seconds: float) -> T | None:
        """The answer, if it is there so many seconds after it was asked for; None if not yet, or
        if asking failed. Whoever comes when these are over does not wait for the first answer."""
        try:
            if self._answer is None and self._asking is not None:
                seconds = max(0.0, seconds - (time.monotonic() - self._began))
            async with asyncio.timeout(seconds):
                return await self.get()
        except Exception:
            return self._answer[0] if self._answer is not None else None

    async def _refresh(self) -> None:
        began = time.monotonic()
        try:
            self._answer = (await asyncio.to_thread(self._ask),)
        except Exception:
            if self._answer is None:
                raise
        finally:
            self._took = time.monotonic() - began
            self._until = time.monotonic() + max(self._seconds, _SHARE * self._took)
            self._asking = None
