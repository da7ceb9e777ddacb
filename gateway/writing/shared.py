"""A gateway's side of the process that commits: the interface of `Writer`, and no thread to share
the interpreter with.

Every work has a number and is kept until its answer is here. When the process dies, the next one
gets whatever had no answer once more: works carry their ids, so what had been committed already is
stored once.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gateway.child import Child
from gateway.store.committer import Work
from gateway.store.database import Database
from gateway.store.histogram import Histogram
from gateway.store.journal_state import JournalState
from gateway.store.records import StoredReward
from gateway.store.rewards import NewReward, RewardList
from gateway.store.rows import EncodedCompletion
from gateway.store.writer import Writer, settle
from gateway.workers import Worker
from gateway.writing.frames import Frames, Orphaned, Status, framed, sent
from gateway.writing.process import FAREWELL, Job

log = logging.getLogger("strop.writer")

_AT_ONCE = 256
"""Works in one frame when all that had no answer are sent again."""

_AGAIN_SECONDS = 0.02
"""Between two attempts to connect."""

_CLOSE_SECONDS = 30.0
"""For which the last works are waited for, and then for the process to end."""

_LONGEST_PATH = 90
"""Bytes of a socket's path that every system takes."""

_NOTHING: Status = (0, 0, (), 0.0, None)

_Waiting = tuple[EncodedCompletion | RewardList, "asyncio.Future[Any]"]


class SharedWriter(Writer):
    """Commits through the process; what is run inside a transaction (`run`) has a thread here."""

    def __init__(
        self,
        database: Database,
        worker: Worker,
        batch: int,
        limit: int,
        journal_pending_days: float,
        traced: Collection[str],
    ):
        super().__init__(database, batch, limit, traced=traced)
        self.journal = None if database.is_sqlite else RemoteJournal(lambda: self.status)
        self.status = _NOTHING
        """What the process last said of itself."""
        self._before = _NOTHING
        """What those before it had counted, while they were this gateway's."""
        self._path = socket_path(worker)
        self._numbers = 0
        self._waiting: dict[int, _Waiting] = {}
        self._unsent: list[int] = []
        self._transport: asyncio.WriteTransport | None = None
        self._heard = False
        """Whether the process has said anything on this connection; its socket is there earlier."""
        self._emptied: asyncio.Event | None = None
        """Set, while closing, when everything has its answer."""
        self._connecting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self.child = Child(
            "gateway.writing",
            "commits",
            lambda: Job(
                database_url=database.url.render_as_string(hide_password=False),
                folder=worker.folder.absolute(),
                listener=self._listen(),
                batch=batch,
                journal_pending_days=journal_pending_days,
                traced=sorted(traced),
            ).model_dump_json(),
            chosen=worker.commits,
            ask_seconds=0.1,
            restart_seconds=0.05,
            descriptors=lambda: (self._listen(),),
        )

    @property
    def counts_all(self) -> bool:
        """Whether this gateway has the process, and counts what it commits for all of them."""
        return self.child.started

    @property
    def commits(self) -> int:
        """Transactions of the process, if it is this gateway's, and of this one's thread."""
        return self._counted()[0] + super().commits

    @property
    def writes(self) -> int:
        """Writes that shared those."""
        return self._counted()[1] + super().writes

    @property
    def commit_seconds(self) -> Histogram:
        """Of one transaction, from its beginning to its commit."""
        own, found = super().commit_seconds, Histogram()
        _, _, counts, seconds, _ = self._counted()
        found.counts = _sums(own.counts, counts)
        found.sum = own.sum + seconds
        return found

    def _counted(self) -> Status:
        if not self.counts_all:
            return _NOTHING
        commits, writes, counts, seconds, journal = self.status
        before = self._before
        return (
            before[0] + commits,
            before[1] + writes,
            tuple(_sums(before[2], counts)),
            before[3] + seconds,
            journal,
        )

    def start(self) -> None:
        """Start the process, if no other gateway has, and connect to it."""
        self.start_thread()
        self.start_process()

    def start_thread(self) -> None:
        """Begin to commit what is run inside a transaction."""
        super().start()

    def start_process(self) -> None:
        """Have the rest committed by the process, as soon as it is there."""
        self.child.start()
        self._connecting = asyncio.create_task(self._keep_connected())

    async def close(self) -> None:
        """Wait until everything is committed, and let the process end if it is this one's."""
        self._emptied = asyncio.Event()
        if self._waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), _CLOSE_SECONDS)
        if self._waiting:
            log.error("%d writes were not committed before the end", len(self._waiting))
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        if self._transport is not None:
            self._transport.close()
        if not await self.child.close(_CLOSE_SECONDS, FAREWELL):
            log.warning("the journal gets empty after the next start")
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        await super().close()

    async def post_rewards(
        self, project: str, posted: Sequence[NewReward]
    ) -> tuple[list[StoredReward], bool] | None:
        """Store rewards, as `Writer` does."""
        result = await super().post_rewards(project, posted)
        if result is None:
            return None
        stored, fresh = result
        # If the process died between its commit and its answer, the second attempt finds what the
        # first has stored. The ids are those of this very call.
        mine = any(new.id == there.id for new, there in zip(posted, stored, strict=True))
        return stored, fresh or mine

    async def _submit(self, work: Work) -> Any:
        if not isinstance(work, (EncodedCompletion, RewardList)) or self._takes_thread():
            return await super()._submit(work)
        try:
            return await self._send(work)
        except Orphaned:
            assert isinstance(work, EncodedCompletion)
            work.detach()
            return await self._send(work)

    def _takes_thread(self) -> bool:
        """Whether the thread is the better one for a completion or rewards that come now."""
        return False

    async def _send(self, work: EncodedCompletion | RewardList) -> Any:
        self.check_room()
        self._pending += 1
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._numbers = number = self._numbers + 1
        self._waiting[number] = (work, future)
        if self._transport is not None:
            self._unsent.append(number)
            if self.in_progress() <= 1:
                self._flush()
            elif len(self._unsent) == 1:
                # What is submitted in one turn of the loop goes out together.
                loop.call_soon(self._flush)
        return await future

    def _flush(self) -> None:
        numbers, self._unsent = self._unsent, []
        if self._transport is not None and numbers:
            self._write(self._transport, numbers)

    def _write(self, transport: asyncio.WriteTransport, numbers: Sequence[int]) -> None:
        works = [(number, sent(self._waiting[number][0])) for number in numbers]
        progress = self.in_progress() - self._pending
        try:
            transport.write(framed((progress, works)))
        except Exception as error:
            if len(numbers) == 1:
                self._settle(numbers[0], error)
                return
            for number in numbers:
                self._write(transport, [number])

    def _settle(self, number: int, result: Any) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        self._pending -= 1
        if not self._waiting and self._emptied is not None:
            self._emptied.set()
        settle(waiting[1], result)

    def answered(self, answers: Sequence[tuple[int, Any]], status: Status | None) -> None:
        """Tell those who wait."""
        self._heard = True
        self.status = status or self.status
        for number, result in answers:
            self._settle(number, result)

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            lost = loop.create_future()
            try:
                transport, _ = await loop.create_unix_connection(
                    lambda lost=lost: _Connection(self, lost),  # type: ignore[misc]
                    str(self._path),
                )
            except OSError:
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            self._transport, self._unsent = transport, []
            numbers = sorted(self._waiting)
            for start in range(0, len(numbers), _AT_ONCE):
                self._write(transport, numbers[start : start + _AT_ONCE])
            await lost
            self._transport, self._heard = None, False
            # The next process begins to count at zero; what is shown must not run backwards.
            self._before = self._counted()
            self.status = (*_NOTHING[:4], self.status[4])
            await asyncio.sleep(_AGAIN_SECONDS)

    def _listen(self) -> int:
        if self._listener is None:
            self._path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                listener.bind(str(self._path))
            finally:
                os.umask(before)
            listener.listen(1024)
            self._listener = listener
        return self._listener.fileno()


def _sums(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


class _Connection(asyncio.Protocol):
    """To the process, for as long as it lives."""

    def __init__(self, writer: SharedWriter, lost: "asyncio.Future[None]"):
        self._writer = writer
        self._lost = lost
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        """Some answers."""
        for answers, status in self._frames.feed(data):
            self._writer.answered(answers, status)

    def connection_lost(self, _error: Exception | None) -> None:
        """It ended."""
        if not self._lost.done():
            self._lost.set_result(None)


class RemoteJournal:
    """What the process last said of its journal."""

    def __init__(self, status: Callable[[], Status]):
        self._status = status

    def state(self) -> dict[str, Any]:
        """How much there is, for people."""
        return (self._status()[4] or JournalState()).shown()


def socket_path(worker: Worker) -> Path:
    """Where gateways of a data folder find the process; one that is alone has one for itself."""
    name = f"writer-{os.getpid()}.sock" if worker.alone else "writer.sock"
    folder = worker.folder.absolute()
    if len(os.fsencode(folder / name)) > _LONGEST_PATH:
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"strop-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder != worker.folder.absolute() and folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder / name
