"""Sending to Langfuse happens in a process of its own, at low priority.

Encoding traces is Python's work, and in the gateway's process it would hold up requests however it
was scheduled. The child gets its settings on its input; when that closes, because the gateway ends
in whatever way, it sends what is left and ends too.
"""

import asyncio
import contextlib
import importlib.util
import logging
import sys
import threading

from pydantic import BaseModel

from gateway.store import Database
from gateway.tracing.settings import LangfuseSettings

log = logging.getLogger("strop.langfuse")

_RESTART_SECONDS = 2.0


class Job(BaseModel):
    """What the child needs to know."""

    database_url: str
    public_url: str
    langfuse: LangfuseSettings


class Tracing:
    """The child, kept alive from `start` to `close`; there is none where nothing is traced."""

    def __init__(self, database_url: str, public_url: str, settings: LangfuseSettings):
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
            code = await self._process.wait()
            if not self._closing:
                log.error("the process that sends to Langfuse ended (%s); starting it again", code)
                await asyncio.sleep(_RESTART_SECONDS)


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
    stop = threading.Event()
    threading.Thread(target=_until_closed, args=(stop,), daemon=True).start()
    run(job, stop)


def _until_closed(stop: threading.Event) -> None:
    while sys.stdin.readline():
        pass
    stop.set()


def run(job: Job, stop: threading.Event) -> None:
    """Exchange with the Langfuse of every project until `stop` is set."""
    from gateway.tracing.channel import Channel
    from gateway.tracing.writes import Writes, relax

    database = Database(job.database_url)
    relax(database)
    writes = Writes(database)
    channels = [
        Channel(writes, project, job.langfuse, job.public_url, stop)
        for project in job.langfuse.projects
    ]
    threads = [threading.Thread(target=channel.run) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writes.close()
    database.dispose()
