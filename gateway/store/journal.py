"""What PostgreSQL could not take, kept on this machine's disk until it can.

While the connection to PostgreSQL is gone, the writer commits completions and rewards to a SQLite
file of its own instead, in the order in which they came. The mover takes them over in that order
when PostgreSQL answers again. Every entry carries its ids, so that one which is moved twice,
because the process died between the two commits, is stored once.
"""

import logging
import sqlite3
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson
import psycopg
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from gateway.store.journal_state import JournalState
from gateway.store.rewards import RewardRefused, UnknownTarget
from gateway.store.rows import EncodedCompletion, Row
from gateway.store.targets import NewReward, RewardList, known_targets

log = logging.getLogger("strop.journal")

Work = EncodedCompletion | RewardList
"""What a journal keeps."""

_READ_BYTES = 32 * 2**20
"""Payload that is moved in one transaction: entries may be as large as requests."""

_PENDING_READ = 1000
"""Most rewards without a target that are looked at in one round."""

_AWAY_SECONDS = 1.0
"""Between two questions whether the database is back."""

_PENDING_SECONDS = 2.0
"""Between two looks for the targets of pending rewards."""

# What is wrong with the entry itself, so that no later attempt would take it.
_BAD_ENTRY = (DataError, IntegrityError, ValueError, KeyError, TypeError)

_SCHEMA = """
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;
CREATE TABLE IF NOT EXISTS entries (
    -- AUTOINCREMENT: a number that is used again could be deleted for its predecessor.
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    payload BLOB NOT NULL,
    at REAL NOT NULL,
    -- When the target of a pending reward was last looked for; null for what waits its turn.
    tried REAL
);
CREATE INDEX IF NOT EXISTS ix_entries_tried ON entries (tried) WHERE tried IS NOT NULL;
CREATE TABLE IF NOT EXISTS rejected (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    payload BLOB NOT NULL,
    at REAL NOT NULL,
    reason TEXT NOT NULL,
    rejected_at REAL NOT NULL
);
"""

_WAITING = "SELECT count(*) FROM entries WHERE tried IS NULL"
_PENDING = "SELECT count(*) FROM entries WHERE tried IS NOT NULL"


def connection_lost(error: BaseException) -> bool:
    """Whether PostgreSQL is away, as opposed to there and refusing what it was asked."""
    if not isinstance(error, DBAPIError):
        return False
    if not isinstance(error.orig, psycopg.OperationalError):
        return error.connection_invalidated
    # The driver's own errors, such as that of a refused connection, have no SQLSTATE. 08 is
    # "connection exception", 57P "operator intervention": shutting down, or not yet started.
    state = error.orig.sqlstate
    return error.connection_invalidated or state is None or state.startswith(("08", "57P"))


@dataclass(slots=True, frozen=True)
class Entry:
    """One entry of the journal."""

    seq: int
    kind: str
    payload: bytes
    at: float

    def work(self) -> Work:
        """What it keeps, ready to be committed."""
        value = orjson.loads(self.payload)
        if self.kind == "rewards":
            return RewardList(value["project"], [NewReward(**item) for item in value["rewards"]])
        return EncodedCompletion(
            trajectory=_unpack(value["trajectory"]),
            # Entries of an earlier release lack what is new.
            group=_group(_unpack(value["group"])) if value["group"] else None,
            completion={"traceparent": None, **_unpack(value["completion"])},
            choices=[_unpack(choice) for choice in value["choices"]],
            continued=_unpack(value["continued"]) if value["continued"] else None,
            tails={},
        )


def _group(row: Row) -> Row:
    return {"oldest_at": row["created_at"], **row}


def packed(work: Work) -> tuple[str, bytes]:
    """The kind and payload of an entry.

    Raises:
        TypeError: it has no JSON form.
    """
    if isinstance(work, RewardList):
        return "rewards", orjson.dumps(work)
    return "completion", orjson.dumps(
        {
            "trajectory": _pack(work.trajectory),
            "group": _pack(work.group) if work.group else None,
            "completion": _pack(work.completion),
            "choices": [_pack(choice) for choice in work.choices],
            "continued": _pack(work.continued) if work.continued else None,
        }
    )


def _pack(row: Row) -> Row:
    # Bytes stand apart: marked among the values, a client's own JSON could look like the mark.
    return {
        "values": {name: value for name, value in row.items() if not isinstance(value, bytes)},
        "bytes": {
            name: b64encode(value).decode() for name, value in row.items() if type(value) is bytes
        },
    }


def _unpack(packed_row: Row) -> Row:
    decoded = {name: b64decode(value) for name, value in packed_row["bytes"].items()}
    return {**packed_row["values"], **decoded}


class Journal:
    """The file. One thread writes; the counts may be read from any."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(
            path, timeout=60, isolation_level=None, check_same_thread=False
        )
        self._connection.executescript(_SCHEMA)
        self.waiting = self._number(_WAITING)
        self.pending = self._number(_PENDING)
        self.rejected = self._number("SELECT count(*) FROM rejected")
        self._oldest_at = self._oldest()

    def counted(self) -> JournalState:
        """How much there is."""
        entries = self.waiting + self.pending
        return JournalState(entries, self._oldest_at, self.pending, self.rejected)

    def state(self) -> dict[str, Any]:
        """How much there is, for people."""
        return self.counted().shown()

    def append(self, entries: Sequence[tuple[str, bytes]]) -> None:
        """Keep entries; they are on disk, all or none, when this returns."""
        now = time.time()
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO entries (kind, payload, at) VALUES (?, ?, ?)",
                [(kind, payload, now) for kind, payload in entries],
            )
        self.waiting += len(entries)
        if self._oldest_at is None:
            self._oldest_at = now

    def next(self, most: int) -> list[Entry]:
        """The oldest entries that wait their turn: at least one if there is any."""
        found: list[Entry] = []
        size = 0
        for row in self._connection.execute(
            "SELECT seq, kind, payload, at FROM entries WHERE tried IS NULL ORDER BY seq LIMIT ?",
            (most,),
        ):
            found.append(Entry(*row))
            size += len(found[-1].payload)
            if size >= _READ_BYTES:
                return found
        if len(found) < most:
            self.waiting = len(found)
        return found

    def next_pending(self, most: int) -> list[Entry]:
        """Rewards whose target was not there, those first that were not tried for longest."""
        rows = self._connection.execute(
            "SELECT seq, kind, payload, at FROM entries WHERE tried IS NOT NULL "
            "ORDER BY tried, seq LIMIT ?",
            (most,),
        )
        return [Entry(*row) for row in rows]

    def settle(
        self,
        moved: Sequence[Entry] = (),
        pending: Sequence[Entry] = (),
        rejected: Sequence[tuple[Entry, str]] = (),
    ) -> None:
        """Note what became of entries, in one transaction."""
        now = time.time()
        gone = [(entry.seq,) for entry in (*moved, *(entry for entry, _ in rejected))]
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT OR IGNORE INTO rejected VALUES (?, ?, ?, ?, ?, ?)",
                [(e.seq, e.kind, e.payload, e.at, reason, now) for e, reason in rejected],
            )
            connection.executemany("DELETE FROM entries WHERE seq = ?", gone)
            connection.executemany(
                "UPDATE entries SET tried = ? WHERE seq = ?", [(now, e.seq) for e in pending]
            )
        before = self.pending
        self.pending = self._number(_PENDING)
        self.waiting -= len(gone) + self.pending - before
        if self.waiting <= 0:
            self.waiting = self._number(_WAITING)
        self.rejected += len(rejected)
        self._oldest_at = self._oldest()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _number(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    def _oldest(self) -> float | None:
        row = self._connection.execute("SELECT at FROM entries ORDER BY seq LIMIT 1").fetchone()
        return float(row[0]) if row is not None else None


class Mover:
    """Takes a journal's entries over into the database; used by the writer's thread alone.

    Args:
        transaction: commits works and operations together; for a list of rewards that is refused
            the result is the refusal.
        ping: raises while the database does not answer.
        batch: most entries of one transaction.
        patience: seconds after which a reward without a target is rejected.
    """

    def __init__(
        self,
        journal: Journal,
        transaction: Callable[[Sequence[Any]], list[Any]],
        ping: Callable[[], None],
        batch: int,
        patience: float,
    ):
        self.journal = journal
        self.away: Exception | None = None
        """Why the database cannot be reached."""
        self._transaction = transaction
        self._ping = ping
        self._batch = batch
        self._patience = patience
        self._not_before = 0.0
        self._pending_at = 0.0
        self._asking: threading.Thread | None = None

    @property
    def takes_over(self) -> bool:
        """Whether a completion or reward must go to the journal: behind what is in it."""
        return self.away is not None or self.journal.waiting > 0

    def wait(self) -> float | None:
        """Seconds until `turn` has something to do; None if only a new entry gives it something."""
        now = time.monotonic()
        if self._asking is not None and self._asking.is_alive():
            return 0.05
        if self.takes_over:
            return max(0.0, self._not_before - now)
        if self.journal.pending:
            return max(0.0, self._pending_at - now)
        return None

    def lost(self, error: Exception) -> None:
        """Note that the database is away."""
        if self.away is None:
            log.warning("the database is away; what comes goes to the journal: %s", error)
        self.away = error
        self._not_before = time.monotonic() + _AWAY_SECONDS

    def turn(self) -> None:
        """Move one batch, if it is time for one."""
        if time.monotonic() < self._not_before:
            return
        if self.away is not None:
            self._ask()
            return
        try:
            # Before what waits: a later reward must not overtake an earlier one of its target.
            if self.journal.pending and time.monotonic() >= self._pending_at:
                self._settle_pending()
            if self.journal.waiting:
                self._replay(self.journal.next(self._batch))
                if not self.journal.waiting:
                    log.info("the journal is empty again")
        except Exception as error:
            if connection_lost(error):
                self.lost(error)
                return
            log.exception("the journal cannot be moved; trying again")
            self._not_before = time.monotonic() + _AWAY_SECONDS

    def finish(self) -> None:
        """Move all that the database takes before the process ends."""
        while self.journal.waiting and not self.away and time.monotonic() >= self._not_before:
            self.turn()

    def _ask(self) -> None:
        # In a thread of its own: connecting to a machine that is gone takes seconds, in which
        # everybody who waits for the journal would wait too.
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._answer, name="strop-ping", daemon=True)
            self._asking.start()

    def _answer(self) -> None:
        try:
            self._ping()
        except Exception as error:
            self.lost(error)
        else:
            self.away = None
            log.warning("the database is back; %d entries to move", self.journal.waiting)

    def _replay(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        try:
            results = self._transaction([entry.work() for entry in entries])
        except Exception as error:
            if connection_lost(error):
                raise
            if len(entries) > 1:
                # One of them is bad: halves find it, and keep the order.
                middle = len(entries) // 2
                self._replay(entries[:middle])
                self._replay(entries[middle:])
                return
            if not isinstance(error, _BAD_ENTRY):
                raise
            results = [error]
        moved, pending, rejected = [], [], []
        for entry, result in zip(entries, results, strict=True):
            # A choice is committed with its completion: if only that is missing, it never comes.
            if isinstance(result, UnknownTarget) and result.param != "choice":
                pending.append(entry)
            elif isinstance(result, (RewardRefused, *_BAD_ENTRY)):
                rejected.append((entry, _rejection(entry, str(result))))
            else:
                moved.append(entry)
        self.journal.settle(moved, pending, rejected)

    def _settle_pending(self) -> None:
        entries = self.journal.next_pending(_PENDING_READ)
        lists = cast(list[RewardList], [entry.work() for entry in entries])
        # One look for all of them, so that two rewards of one target are settled together.
        found = self._transaction([partial(known_targets, lists=lists)])[0]
        ready = [entry for entry, known in zip(entries, found, strict=True) if known]
        unknown = [entry for entry, known in zip(entries, found, strict=True) if not known]
        self._replay(sorted(ready, key=lambda entry: entry.seq))
        oldest = time.time() - self._patience
        self.journal.settle(
            pending=[entry for entry in unknown if entry.at >= oldest],
            rejected=[
                (entry, _rejection(entry, "its completion or trajectory never came"))
                for entry in unknown
                if entry.at < oldest
            ],
        )
        self._pending_at = time.monotonic() + _PENDING_SECONDS


def _rejection(entry: Entry, reason: str) -> str:
    log.error("entry %d of the journal (%s) was rejected: %s", entry.seq, entry.kind, reason)
    return reason
