"""Sending to Langfuse happens in a process of its own, at low priority.

Encoding traces is Python's work, and in the gateway's process it would hold up requests however it
was scheduled. The child gets its settings on its input, and then how busy the gateway is, by which
it paces itself; when that input closes, because the gateway ends in whatever way, it sends what is
left and ends too. Of several processes of one gateway one has a child.
"""

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable

from pydantic import BaseModel

from gateway.child import Child
from gateway.store import Database
from gateway.tracing.pace import Idle, Meter, Pace
from gateway.tracing.settings import LangfuseSettings

log = logging.getLogger("strop.langfuse")

_RESTART_SECONDS = 2.0
_ASK_SECONDS = 2.0
"""Between two looks whether this process is the one that sends."""


class Job(BaseModel):
    """What the child needs to know."""

    database_url: str
    public_url: str
    langfuse: LangfuseSettings


class Tracing:
    """The child, kept alive from `start` to `close`; there is none where nothing is traced."""

    def __init__(
        self,
        database_url: str,
        public_url: str,
        settings: LangfuseSettings,
        sends: Callable[[], bool] = lambda: True,
    ):
        """
        Args:
            sends: whether this process is the one that sends; asked until it is.
        """
        self._settings = settings
        job = Job(database_url=database_url, public_url=public_url, langfuse=settings)
        meter = Meter()
        self._child = Child(
            "gateway.tracing",
            "sends to Langfuse",
            job.model_dump_json,
            chosen=sends,
            ask_seconds=_ASK_SECONDS,
            restart_seconds=_RESTART_SECONDS,
            # How busy this process is.
            tell=lambda: f"{meter.share():.3f}",
        )

    def start(self) -> None:
        """Start the child, and start it again whenever it dies."""
        if not self._settings.projects:
            return
        if importlib.util.find_spec("langfuse") is None:
            log.error("Langfuse is off: `pip install strop[langfuse]` brings what it needs")
            return
        self._child.start()

    async def close(self) -> None:
        """Let the child send what is left, for as long as the settings allow."""
        if not await self._child.close(self._settings.drain_seconds + 5.0):
            log.warning("Langfuse gets the rest after the next start")


def main() -> None:
    """The child."""
    # Ctrl-C and the stop of a whole process group reach the gateway, which tells us.
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    line = sys.stdin.readline()
    if not line:
        return
    job = Job.model_validate_json(line)
    stop, pace = threading.Event(), Pace(job.langfuse.lag_seconds)
    threading.Thread(target=_listen, args=(stop, pace), daemon=True).start()
    run(job, stop, pace)


def _listen(stop: threading.Event, pace: Pace) -> None:
    idle, own = Idle(), Meter()
    while line := sys.stdin.readline():
        pace.told(float(line), idle.cores() + own.share())
    stop.set()


def run(job: Job, stop: threading.Event, pace: Pace) -> None:
    """Exchange with the Langfuse of every project until `stop` is set."""
    from gateway.tracing.channel import Channel
    from gateway.tracing.writes import Writes, relax

    database = Database(job.database_url)
    relax(database)
    writes = Writes(database)
    channels = [
        Channel(writes, project, job.langfuse, job.public_url, stop, pace)
        for project in job.langfuse.projects
    ]
    threads = [threading.Thread(target=channel.run) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writes.close()
    database.dispose()
