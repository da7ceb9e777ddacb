"""A process of strop's own that does one thing beside the gateway, and is started again if it dies.

It gets what it needs to know as the first line of its input. When that input closes, because the
gateway ends in whatever way, it finishes and ends too. Of several processes of one gateway one has
such a child.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Sequence

log = logging.getLogger("strop.child")

_TELL_SECONDS = 0.25
"""Between two words to the child."""


class Child:
    """`python -m MODULE`, kept alive from `start` to `close`."""

    def __init__(
        self,
        module: str,
        what: str,
        job: Callable[[], str],
        *,
        chosen: Callable[[], bool],
        ask_seconds: float,
        restart_seconds: float,
        descriptors: Callable[[], Sequence[int]] = tuple,
        tell: Callable[[], str] | None = None,
    ):
        """
        Args:
            what: it is, for the log.
            job: its first line of input, without the line's end.
            chosen: whether this process is the one that has the child; asked until it is, every
                `ask_seconds`.
            descriptors: that it inherits; asked once, before `job`.
            tell: further lines of its input, asked for every quarter of a second.
        """
        self._module = module
        self._what = what
        self._job = job
        self._chosen = chosen
        self._ask_seconds = ask_seconds
        self._restart_seconds = restart_seconds
        self._descriptors = descriptors
        self._tell = tell
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def started(self) -> bool:
        """Whether this process has, or had, the child."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Of the process that runs now, if this one has it."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    def start(self) -> None:
        """Start it, and start it again whenever it ends."""
        self._task = asyncio.create_task(self._keep())

    async def close(self, patience: float, farewell: bytes = b"") -> bool:
        """Close its input and wait for its end; after `patience` seconds it is killed.

        Returns:
            Whether it ended by itself.
        """
        self._closing = True
        if self._task is None:
            return True
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(farewell)
            process.stdin.close()
        try:
            await asyncio.wait_for(self._task, patience)
        except TimeoutError:
            return False
        finally:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        return True

    async def _keep(self) -> None:
        while not self._chosen():
            if self._closing:
                return
            await asyncio.sleep(self._ask_seconds)
        descriptors = self._descriptors()
        while not self._closing:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=descriptors,
            )
            stdin = self._process.stdin
            assert stdin is not None
            try:
                stdin.write(self._job().encode() + b"\n")
                await stdin.drain()
            except ConnectionError:
                pass
            if self._closing:
                stdin.close()
            code = await self._watch(self._process, stdin)
            if not self._closing:
                log.error("the process that %s ended (%s); starting it again", self._what, code)
                await asyncio.sleep(self._restart_seconds)

    async def _watch(self, process: asyncio.subprocess.Process, stdin: asyncio.StreamWriter) -> int:
        if self._tell is None:
            return await process.wait()
        end = asyncio.create_task(process.wait())
        try:
            while not (await asyncio.wait([end], timeout=_TELL_SECONDS))[0]:
                if not stdin.is_closing():
                    stdin.write(self._tell().encode() + b"\n")
            return end.result()
        finally:
            end.cancel()
