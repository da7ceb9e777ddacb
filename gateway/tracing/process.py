"""Sending to Langfuse happens in a process of its own, at low priority.

Encoding traces is Python's work, and in the gateway's process it would hold up requests however it
was scheduled. The child gets its settings on its input, and then how busy the gateway is, by which
it paces itself; when that input closes, because the gateway ends in whatever way, it sends what is
left and ends too. Of several processes of one gateway one has a child.
"""

import asyncio
import contextlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable

from pydantic import BaseModel

from gateway.store import Database
from gateway.tracing.pace import Meter, Pace
from gateway.tracing.settings import LangfuseSettings

log = logging.getLogger("strop.langfuse")

_RESTART_SECONDS = 2.0
_TELL_SECONDS = 0.25
"""Between two words to the child of how busy the gateway is."""

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
        self._sends = sends
        self._job = Job(database_url=database_url, public_url=public_url, langfuse=settings)
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        """Start the child, and start it again whenever it dies."""
        if not self._job.langfuse.projects:
            return
        if importlib.util.find_spec("langfuse") is None:
            log.error("Langfuse is off: `pip install strop[langfuse]` brings what it needs")
            return
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Let the child send what is left, for as long as the settings allow."""
        self._closing = True
        if self._task is None:
            return
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(self._task, self._job.langfuse.drain_seconds + 5.0)
        except TimeoutError:
            log.warning("Langfuse gets the rest after the next start")
        finally:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def _keep(self) -> None:
        while not self._sends():
            if self._closing:
                return
            await asyncio.sleep(_ASK_SECONDS)
        while not self._closing:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway.tracing", stdin=asyncio.subprocess.PIPE
            )
            stdin = self._process.stdin
            assert stdin is not None
            try:
                stdin.write(self._job.model_dump_json().encode() + b"\n")
                await stdin.drain()
            except ConnectionError:
                pass
            if self._closing:
                stdin.close()
            code = await self._watch(self._process, stdin)
            if not self._closing:
                log.error("the process that sends to Langfuse ended (%s); starting it again", code)
                await asyncio.sleep(_RESTART_SECONDS)

    async def _watch(self, process: asyncio.subprocess.Process, stdin: asyncio.StreamWriter) -> int:
        """Tell the child how busy this process is, until it ends."""
        meter = Meter()
        end = asyncio.create_task(process.wait())
        try:
            while not (await asyncio.wait([end], timeout=_TELL_SECONDS))[0]:
                if not stdin.is_closing():
                    stdin.write(f"{meter.share():.3f}\n".encode())
            return end.result()
        finally:
            end.cancel()


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
    while line := sys.stdin.readline():
        pace.told(float(line))
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
