"""One look at the table of events for everybody who waits for the next one."""

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from gateway.store import Database, events
from gateway.store.events import StoredEvent
from gateway.store.journal import connection_lost

log = logging.getLogger("strop.events")


def event_json(event: StoredEvent) -> dict[str, Any]:
    """An event as the API and webhooks show it."""
    return {
        "object": "event",
        "id": event.id,
        "type": event.kind,
        "policy": event.policy,
        "version": event.version,
        "created_at": event.at,
        "data": event.detail,
    }


class EventHub:
    """Polls the database while somebody listens; trainers and other gateways write there too."""

    def __init__(self, database: Database, poll: float):
        self._database = database
        self._poll = poll
        self._listeners = 0
        self._wanted = asyncio.Event()
        self._changed = asyncio.Condition()
        self.settled = 0
        """Every event up to this number is there."""
        self._looked = False
        self.closing = False

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._wanted.wait()
            try:
                await self._look()
            except Exception as error:
                if not connection_lost(error):
                    log.exception("looking for events failed; trying again")
            await asyncio.sleep(self._poll)

    async def _look(self) -> None:
        before = self.settled
        now = await asyncio.to_thread(self._read, before if self._looked else None)
        self._looked = True
        if now > self.settled:
            self.settled = now
            async with self._changed:
                self._changed.notify_all()

    def _read(self, cursor: int | None) -> int:
        with self._database.read() as connection:
            if cursor is None:
                return events.start(connection)
            return events.settled(connection, cursor)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this lasts, the database is looked at."""
        self._listeners += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._wanted.clear()

    async def now(self) -> int:
        """The newest settled number, looked up."""
        await self._look()
        return self.settled

    async def beyond(self, cursor: int, patience: float) -> bool:
        """Wait for a settled event beyond `cursor`; False if none came in so many seconds."""
        # Not `wait_for`, which on Python 3.11 can swallow the cancellation of its caller.
        try:
            async with asyncio.timeout(patience), self._changed:
                await self._changed.wait_for(lambda: self.settled > cursor or self.closing)
        except TimeoutError:
            return False
        return self.settled > cursor

    async def stream(
        self,
        project: str,
        after: int,
        *,
        policy: str | None = None,
        kinds: Collection[str] = (),
        pause: float = 15.0,
    ) -> AsyncIterator[StoredEvent | None]:
        """The events of a project from now on; None after each pause in which none came.

        Ends when the gateway shuts down.
        """
        with self.listening():
            while not self.closing:
                if not await self.beyond(after, pause):
                    yield None
                    continue
                upto = self.settled
                found = await self.read(project, after, upto, policy)
                for event in found:
                    if not kinds or event.kind in kinds:
                        yield event
                after = found[-1].id if len(found) == events.PAGE else upto

    async def read(
        self, project: str, after: int, upto: int, policy: str | None
    ) -> list[StoredEvent]:
        """A page of a project's events."""

        def ask() -> list[StoredEvent]:
            with self._database.read() as connection:
                return events.between(connection, project, after, upto, policy=policy)

        return await asyncio.to_thread(ask)

    async def close(self) -> None:
        """End all streams."""
        self.closing = True
        async with self._changed:
            self._changed.notify_all()

    @contextmanager
    def ending_with_the_process(self) -> Iterator[None]:
        """End the streams as soon as the process is told to stop.

        The server waits for its connections before it stops the application, and a stream of
        events has no end of its own.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def handler(number: int, frame: object) -> None:
            loop.call_soon_threadsafe(lambda: loop.create_task(self.close()))
            earlier = before[signal.Signals(number)]
            if callable(earlier):
                call: Callable[..., object] = earlier
                call(number, frame)

        # Only where the server has handlers of its own, which are then called as before.
        ours = [number for number, earlier in before.items() if callable(earlier)]
        ours = [n for n in ours if before[n] is not signal.default_int_handler]
        for number in ours:
            signal.signal(number, handler)
        try:
            yield
        finally:
            for number in ours:
                if signal.getsignal(number) is handler:
                    signal.signal(number, before[number])
