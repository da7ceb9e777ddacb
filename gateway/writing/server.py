"""The loop of the process that commits: take what all gateways sent, commit it once, answer.

It has one thread. What comes while a batch is being committed stays in the sockets, and is the next
batch.
"""

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from gateway.store.committer import Committer, Work
from gateway.store.writer import Pause
from gateway.writing.frames import Frames, Status, framed, received

log = logging.getLogger("strop.writer")

_PIECE_BYTES = 1 << 18
_NEWS_SECONDS = 0.1
_LAST_WORDS = 5.0
"""Seconds in which gateways must take their last answers."""


class _Gateway:
    """One that is connected."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.frames = Frames()
        self.progress = 0
        """Requests that it is answering and that have submitted nothing yet."""
        self.unsent = bytearray()
        self.answers: list[tuple[int, Any]] = []


class Server:
    """Serves gateways until its input closes."""

    def __init__(
        self,
        listener: socket.socket,
        orders: socket.socket | int,
        committer: Committer,
        batch: int,
    ):
        """
        Args:
            listener: where gateways connect.
            orders: what closes, or has something to read, when it is time to end.
            batch: most works of one commit.
        """
        self._listener = listener
        self._committer = committer
        self._batch = batch
        self._queue: deque[tuple[_Gateway, int, Work]] = deque()
        self._pause = Pause()
        self._news_at: float | None = None
        """When to tell how this process is; None: nothing has happened since it was told."""
        self._gateways: set[_Gateway] = set()
        self._orders = orders
        self._ending = False
        # One for all, as memory of this size would be asked of the system each time.
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(orders, selectors.EVENT_READ)

    def run(self) -> None:
        """Commit and answer, then commit what had come."""
        while not self._ending:
            self._take(0.0 if self._queue else self._patience())
            if self._queue:
                if self._pause.wait(self._in_progress):
                    self._take(0.0)
                self._commit()
            self._committer.turn()
            if self._news_at is not None and time.monotonic() >= self._news_at:
                self._tell(self._gateways, self._status())
        while self._queue:
            self._commit()
        self._say_last_words()

    def _patience(self) -> float | None:
        """Seconds until there is something to do, if nothing comes."""
        waits = [self._committer.wait()]
        if self._news_at is not None:
            waits.append(max(0.0, self._news_at - time.monotonic()))
        return min((wait for wait in waits if wait is not None), default=None)

    def _take(self, timeout: float | None) -> None:
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._orders:
                self._ending = True
            else:
                if events & selectors.EVENT_WRITE:
                    self._send(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        gateway = _Gateway(connection)
        self._gateways.add(gateway)
        self._selector.register(connection, selectors.EVENT_READ, gateway)
        self._tell([gateway], self._status())

    def _read(self, gateway: _Gateway) -> None:
        try:
            size = gateway.connection.recv_into(self._piece)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._forget(gateway)
            return
        for progress, works in gateway.frames.feed(self._piece[:size]):
            gateway.progress = progress
            self._queue.extend((gateway, number, received(thing)) for number, thing in works)

    def _forget(self, gateway: _Gateway) -> None:
        # What it submitted is committed all the same: only nobody hears of it.
        if gateway in self._gateways:
            self._gateways.remove(gateway)
            self._selector.unregister(gateway.connection)
            gateway.connection.close()

    def _in_progress(self) -> int:
        return sum(gateway.progress for gateway in self._gateways)

    def _commit(self) -> None:
        size = min(self._batch, len(self._queue))
        items = [self._queue.popleft() for _ in range(size)]
        results = self._committer.commit([work for _, _, work in items])
        for (gateway, number, _), result in zip(items, results, strict=True):
            gateway.answers.append((number, result))
        self._tell({gateway for gateway, _, _ in items} & self._gateways)

    def _tell(self, gateways: Collection[_Gateway], status: Status | None = None) -> None:
        if status is None:
            self._news_at = self._news_at or time.monotonic() + _NEWS_SECONDS
        for gateway in list(gateways):
            answers, gateway.answers = gateway.answers, []
            try:
                gateway.unsent += framed((answers, status))
            except Exception:
                gateway.unsent += framed(([_plain(*each) for each in answers], status))
            self._send(gateway)

    def _send(self, gateway: _Gateway) -> None:
        try:
            while gateway.unsent:
                sent = gateway.connection.send(gateway.unsent)
                del gateway.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._forget(gateway)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if gateway.unsent else 0)
        if self._selector.get_key(gateway.connection).events != wanted:
            self._selector.modify(gateway.connection, wanted, gateway)

    def _say_last_words(self) -> None:
        for gateway in list(self._gateways):
            gateway.connection.settimeout(_LAST_WORDS)
            with suppress(OSError):
                gateway.connection.sendall(gateway.unsent)
            self._forget(gateway)
        self._selector.close()

    def _status(self) -> Status:
        committer = self._committer
        histogram = committer.commit_seconds
        found = committer.mover.journal.counted() if committer.mover is not None else None
        # While the journal moves, there are news all the time.
        busy = found is not None and found.entries > 0
        self._news_at = time.monotonic() + _NEWS_SECONDS if busy else None
        return (
            committer.commits,
            committer.writes,
            tuple(histogram.counts),
            histogram.sum,
            found,
        )


def _plain(number: int, result: Any) -> tuple[int, Any]:
    """An answer that can be sent, where the result itself cannot."""
    try:
        framed(([(number, result)], None))
    except Exception:
        log.exception("a result could not be sent as it is: %r", result)
        return number, RuntimeError(f"{type(result).__name__}: {result}")
    return number, result
