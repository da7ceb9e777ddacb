"""The process that commits: from its first line of input to its end."""

import fcntl
import logging
import os
import signal
import socket
import time
from pathlib import Path

from pydantic import BaseModel

from gateway.memory import settle_memory
from gateway.store import Database
from gateway.store.committer import Committer
from gateway.store.journal import Journal
from gateway.workers import take_over
from gateway.writing.server import Server

log = logging.getLogger("strop.writer")

FAREWELL = b"bye\n"
"""Before the input closes: there is time to move what is in the journal."""

_LOCK_SECONDS = 30.0


class Job(BaseModel):
    """What the process needs to know."""

    database_url: str
    folder: Path
    """The data folder, where the journal is."""
    listener: int
    """A descriptor: the socket on which gateways connect."""
    batch: int
    journal_pending_days: float
    traced: list[str]


def main() -> None:
    """Commit until the input closes."""
    # Ctrl-C and the stop of a whole process group reach the gateways, which have to finish first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    line, farewell = _first_line()
    if not line:
        return
    job = Job.model_validate_json(line)
    database = Database(job.database_url)
    # On SQLite a journal would be lost and full together with the database.
    journal = None if database.is_sqlite else _journal(job.folder)
    committer = Committer(database, job.batch, journal, job.journal_pending_days, job.traced)
    listener = socket.socket(fileno=job.listener)
    settle_memory()
    if not farewell:
        Server(listener, 0, committer, job.batch).run()
        farewell = os.read(0, len(FAREWELL))
    committer.close(finish=bool(farewell))
    database.dispose()


def _first_line() -> tuple[bytes, bytes]:
    # Not through a buffer, in which a farewell could get stuck.
    read = b""
    while b"\n" not in read:
        piece = os.read(0, 1 << 16)
        if not piece:
            return b"", b""
        read += piece
    line, _, rest = read.partition(b"\n")
    return line, rest


def _journal(folder: Path) -> Journal:
    """The one journal of the folder, with what others hold that have no process any more."""
    folder.mkdir(parents=True, exist_ok=True)
    # It stays open, and with it the lock, until this process ends. The one before, whose gateway
    # died, may still be committing what it had received.
    lock = os.open(folder / "journal.lock", os.O_CREAT | os.O_RDWR, 0o600)
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                log.error("another process has the journal in %s, and does not end", folder)
                raise SystemExit(1) from None
            time.sleep(0.02)
    journal = Journal(folder / "journal.db")
    # Gateways that commit for themselves have one each.
    for path in sorted(folder.glob("journal-*.db")):
        found = take_over(path, journal)
        if found:
            log.warning("%d entries of %s are taken over", found, path)
    return journal
