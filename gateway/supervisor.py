"""Keeps the processes of `strop up` running: starts, waits until ready, restarts, stops.

    await run_children(
        [
            Child("vllm", launch.command, env=launch.env, ready=http_ready(launch.url + "/health")),
            Child("gateway", [...], ready=http_ready("http://127.0.0.1:8000/health")),
            Child("trainer", [...]),
        ],
        data_dir=settings.data_dir,
    )

Every child is the leader of a process group of its own, and is stopped with the whole group. Its
output goes straight into a file, so that a child outlives neither a full pipe nor a lost reader.
"""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.text import Text

from gateway import reaper

_POLL = 0.2
_TAIL_BYTES = 256 * 1024
_BACKOFF = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_STABLE_SECONDS = 60.0
"""A child that ran for so long is restarted after the first pause again."""
_STARTING_GRACE = 3.0
"""A child that is not ready yet has nothing to finish, and vLLM ignores SIGTERM until it is."""
_STYLES = ("cyan", "magenta", "green", "yellow", "blue")

Ready = Callable[[], Awaitable[bool]]


class StartFailed(Exception):
    """A child ended, or took too long, before it was ready for the first time."""


def last_line(log: str, returncode: int) -> str:
    """The last line of a log that is not empty, as an explanation."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with {describe_exit(returncode)} and no output"


def describe_exit(returncode: int) -> str:
    """`exit code 3`, or `signal 9 (SIGKILL)`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    with contextlib.suppress(ValueError):
        return f"signal {-returncode} ({signal.Signals(-returncode).name})"
    return f"signal {-returncode}"


def http_ready(url: str) -> Ready:
    """A check that is passed once a GET answers 200."""

    async def check() -> bool:
        timeout = aiohttp.ClientTimeout(total=5)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    return check


@dataclass(frozen=True)
class Child:
    """One process to keep running."""

    name: str
    """Shown before its lines, and the name of its log file."""
    command: Sequence[str]
    env: Mapping[str, str] | None = None
    """Its whole environment; None: this process's."""
    cwd: Path | None = None
    ready: Ready | None = None
    """Asked until it says yes. None: ready at once when it has been started."""
    needs: tuple[str, ...] = ()
    """Children that have to be ready before this one is started."""
    start_timeout: float = 600.0
    """Seconds until it must be ready."""
    stop_timeout: float = 15.0
    """Seconds between SIGTERM and SIGKILL."""
    restart: bool = True
    """Start it again when it ends; otherwise it may end with exit code 0."""
    explain: Callable[[str, int], str] = last_line
    """One sentence from its log and exit code about why it ended."""
    key_lines: re.Pattern[str] | None = None
    """Lines of its log that are shown even when not verbose."""


async def run_children(
    children: Sequence[Child],
    *,
    data_dir: Path,
    verbose: bool = False,
    console: Console | None = None,
    stop: asyncio.Event | None = None,
    all_ready: Callable[[], None] | None = None,
) -> None:
    """Start the children, keep them running, and return once all are stopped again.

    They are started together, except that `needs` is waited for. SIGINT, SIGTERM and `stop` end
    them in reverse order; a second signal kills whatever is left at once. A child that had been
    ready and ended is started again, after pauses that grow from 1 to 30 seconds.

    Args:
        data_dir: logs go to `logs/NAME.log` in it; the log of the run before is kept as
            `logs/NAME.1.log`.
        verbose: show all their lines, instead of only `key_lines`.
        all_ready: called once, when every child has become ready for the first time.

    Raises:
        StartFailed: a child did not become ready. The others have been stopped.
    """
    stopping = stop or asyncio.Event()
    kill_now = asyncio.Event()
    console = console or Console(highlight=False)
    async with _reaping() as groups, _signals(stopping, kill_now):
        running = [
            _Running(child, data_dir / "logs", groups, _Voice(console, child, number), verbose)
            for number, child in enumerate(children)
        ]
        by_name = {one.child.name: one for one in running}
        keepers = [asyncio.create_task(one.keep(by_name)) for one in running]
        helpers = [asyncio.create_task(one.follow()) for one in running]
        if all_ready is not None:
            helpers.append(asyncio.create_task(_when_ready(running, all_ready)))
        stopped = asyncio.create_task(stopping.wait())
        try:
            await _until_stopped(stopped, keepers)
        finally:
            # No keeper may start a child again while they are being stopped.
            await _cancel([stopped, *keepers])
            for one in reversed(running):
                await one.stop(kill_now)
            await _cancel(helpers)
            for one in running:
                one.show_new_lines()


async def _until_stopped(
    stopped: asyncio.Task[bool], keepers: Sequence[asyncio.Task[None]]
) -> None:
    pending: set[asyncio.Task[bool] | asyncio.Task[None]] = {stopped, *keepers}
    while stopped in pending and len(pending) > 1:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def _when_ready(running: Sequence["_Running"], call: Callable[[], None]) -> None:
    for one in running:
        await one.was_ready.wait()
    call()


async def _cancel(tasks: Sequence[asyncio.Task[bool] | asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _signals(stopping: asyncio.Event, kill_now: asyncio.Event) -> AsyncIterator[None]:
    def received() -> None:
        if stopping.is_set():
            kill_now.set()
        stopping.set()

    # Only the main thread may handle signals; elsewhere `stop` is the only way.
    main = threading.current_thread() is threading.main_thread()
    loop = asyncio.get_running_loop()
    handled = (signal.SIGINT, signal.SIGTERM) if main else ()
    for number in handled:
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


class _Groups:
    """The list of process groups that the reaper ends if this process cannot."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def add(self, group: int) -> None:
        self._say(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._say(f"-{group}\n")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


@contextlib.asynccontextmanager
async def _reaping() -> AsyncIterator[_Groups]:
    # -I and -S: it needs no packages, and none may slow it down or break it.
    command = [sys.executable, "-I", "-S", reaper.__file__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: ASYNC220 (returns at once)
    try:
        yield _Groups(process)
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        await asyncio.to_thread(process.wait)


class _Voice:
    """Prints lines with a child's name in front, in its colour."""

    def __init__(self, console: Console, child: Child, number: int) -> None:
        self._console = console
        self._prefix = (f"{child.name:>8} ", _STYLES[number % len(_STYLES)])

    def say(self, line: str, style: str = "") -> None:
        self._console.print(Text.assemble(self._prefix, (line, style)), soft_wrap=True)


class _Running:
    """A child over all of its starts."""

    def __init__(
        self, child: Child, logs: Path, groups: _Groups, voice: _Voice, verbose: bool
    ) -> None:
        self.child = child
        self.was_ready = asyncio.Event()
        """It has been ready once."""
        self._groups = groups
        self._voice = voice
        self._verbose = verbose
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self._shown = 0
        self._began_at = 0
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{child.name}.log"
        if self._log.exists():
            self._log.replace(logs / f"{child.name}.1.log")
        self._log.touch()

    async def keep(self, others: Mapping[str, "_Running"]) -> None:
        """Start it, and start it again whenever it ends."""
        for name in self.child.needs:
            await others[name].was_ready.wait()
        failures = 0
        while True:
            began = time.monotonic()
            trouble = await self._start()
            if trouble is None:
                self._ready = True
                self.was_ready.set()
                self._voice.say(f"ready ({time.monotonic() - began:.1f} s)")
                trouble = await self._ended()
                self._ready = False
                if not self.child.restart:
                    if trouble == "":
                        return
                    raise StartFailed(f"{self.child.name} failed: {trouble} (log: {self._log})")
            elif not self.was_ready.is_set():
                raise StartFailed(f"{self.child.name} did not start: {trouble} (log: {self._log})")
            stable = time.monotonic() - began > _STABLE_SECONDS
            failures = 1 if stable else failures + 1
            pause = _BACKOFF[min(failures, len(_BACKOFF)) - 1]
            self._voice.say(f"ended: {trouble}; starting it again in {pause:g} s", "red")
            await asyncio.sleep(pause)

    async def follow(self) -> None:
        """Show its lines as they are written."""
        while True:
            self.show_new_lines()
            await asyncio.sleep(_POLL)

    def show_new_lines(self) -> None:
        """Show what was written since the last time, whole lines only."""
        with self._log.open("rb") as log:
            log.seek(self._shown)
            new = log.read()
        whole, newline, _ = new.rpartition(b"\n")
        self._shown += len(whole) + len(newline)
        key = self.child.key_lines
        for line in whole.decode(errors="replace").splitlines():
            if self._verbose or (key is not None and key.search(line)):
                self._voice.say(line)

    async def _start(self) -> str | None:
        """Start it and wait until it is ready; else the reason why it is not."""
        self._began_at = self._log.stat().st_size
        with self._log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.child.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.child.env,
                    cwd=self.child.cwd,
                    start_new_session=True,
                )
            except OSError as error:
                return f"{self.child.command[0]} cannot be run: {error.strerror}"
        self._groups.add(self._process.pid)
        if self.child.ready is None:
            return None
        ended = asyncio.create_task(self._process.wait())
        try:
            async with asyncio.timeout(self.child.start_timeout):
                while not ended.done():
                    if await self.child.ready() and not ended.done():
                        return None
                    await asyncio.wait([ended], timeout=_POLL)
            return await self._ended()
        except TimeoutError:
            await self.stop()
            return f"it was not ready after {self.child.start_timeout:g} s"
        finally:
            ended.cancel()

    async def _ended(self) -> str:
        """Wait for its end and say why; empty if it was meant to end."""
        assert self._process is not None
        code = await self._process.wait()
        # Whoever it started goes with it: a port or a GPU that is still held fails the next start.
        self._leave()
        if code == 0 and self._ready and not self.child.restart:
            return ""
        return self.child.explain(self._recent_log(), code)

    def _recent_log(self) -> str:
        """The log since the newest start, at most its last part."""
        with self._log.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(self._began_at, size - _TAIL_BYTES))
            return log.read().decode(errors="replace")

    def _leave(self) -> None:
        if self._process is not None:
            reaper.send(self._process.pid, signal.SIGKILL)
            self._groups.remove(self._process.pid)
            self._process = None

    async def stop(self, kill_now: asyncio.Event | None = None) -> None:
        """SIGTERM to its group, time to finish, SIGKILL to whoever is left."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            reaper.send(process.pid, signal.SIGTERM)
            grace = self.child.stop_timeout
            if not self._ready and self.child.ready is not None:
                grace = min(grace, _STARTING_GRACE)
            waits = [asyncio.create_task(process.wait())]
            if kill_now is not None:
                waits.append(asyncio.create_task(_as_code(kill_now)))
            await asyncio.wait(waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            reaper.send(process.pid, signal.SIGKILL)
            await process.wait()
            for wait in waits:
                wait.cancel()
        self._leave()


async def _as_code(event: asyncio.Event) -> int:
    await event.wait()
    return 0
