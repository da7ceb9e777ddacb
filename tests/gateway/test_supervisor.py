import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from gateway.supervisor import Child, Ready, StartFailed, describe_exit, http_ready, run_children

FOREVER = "import time\nprint('up', flush=True)\ntime.sleep(600)"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER
# A child with a child of its own, which ignores SIGTERM and outlives its parent.
FAMILY = (
    "import subprocess, sys, pathlib\n"
    f"kid = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])\n"
    "pathlib.Path('kid').write_text(str(kid.pid))\n" + FOREVER
)


def python(name: str, code: str, **options: object) -> Child:
    return Child(name, [sys.executable, "-c", code], **options)  # type: ignore[arg-type]


def has_text(path: Path) -> bool:
    return path.exists() and path.read_text() != ""


def wrote(path: Path) -> Ready:
    async def check() -> bool:
        return has_text(path)

    return check


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def eventually(check: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it did not happen"
        await asyncio.sleep(0.05)


class Run:
    """`run_children` in the background, with what it printed."""

    def __init__(self, folder: Path, *children: Child, verbose: bool = False) -> None:
        self.printed = io.StringIO()
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()
        self.task = asyncio.create_task(
            run_children(
                children,
                data_dir=folder,
                verbose=verbose,
                console=Console(file=self.printed, width=200, color_system=None),
                stop=self.stop,
                all_ready=self.ready.set,
            )
        )

    @property
    def text(self) -> str:
        return self.printed.getvalue()

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 20)


async def test_says_when_a_child_is_ready_and_how_long_it_took(tmp_path: Path) -> None:
    run = Run(tmp_path, python("one", FOREVER))
    await asyncio.wait_for(run.ready.wait(), 10)
    await eventually(lambda: has_text(tmp_path / "logs" / "one.log"))
    await run.end()
    assert re.search(r"one ready \(\d+\.\d s\)", run.text)
    assert "up" not in run.text
    assert (tmp_path / "logs" / "one.log").read_text() == "up\n"


async def test_verbose_shows_every_line_and_key_lines_are_always_shown(tmp_path: Path) -> None:
    code = "print('step 1'); print('chatter')\n" + FOREVER
    quiet = Run(tmp_path / "a", python("trainer", code, key_lines=re.compile("^step")))
    loud = Run(tmp_path / "b", python("trainer", code), verbose=True)
    await eventually(lambda: "step 1" in quiet.text and "chatter" in loud.text)
    await quiet.end()
    await loud.end()
    assert "chatter" not in quiet.text


async def test_failed_start_is_explained_and_stops_the_others(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    other = python(
        "other", f"import os; open({str(pid)!r}, 'w').write(str(os.getpid()))\n{FOREVER}"
    )
    broken = python(
        "broken",
        "import time; time.sleep(0.5); raise SystemExit('no such model')",
        ready=wrote(tmp_path / "never"),
        explain=lambda log, code: f"{log.strip()}, code {code}",
    )
    run = Run(tmp_path, other, broken)
    with pytest.raises(StartFailed, match=r"broken did not start: no such model, code 1 \(log: .*"):
        await asyncio.wait_for(run.task, 20)
    assert not alive(int(pid.read_text()))


async def test_command_that_does_not_exist_is_explained(tmp_path: Path) -> None:
    run = Run(tmp_path, Child("ghost", ["/no/such/program"]))
    with pytest.raises(StartFailed, match="/no/such/program cannot be run: No such file"):
        await asyncio.wait_for(run.task, 10)


async def test_child_that_is_never_ready_fails_after_its_timeout(tmp_path: Path) -> None:
    slow = python("slow", FOREVER, ready=wrote(tmp_path / "never"), start_timeout=0.5)
    run = Run(tmp_path, slow)
    with pytest.raises(StartFailed, match=r"slow did not start: it was not ready after 0\.5 s"):
        await asyncio.wait_for(run.task, 10)


async def test_crash_after_ready_restarts(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write('x')\nimport os, time\ntime.sleep(0.4)\nos._exit(7)"
    run = Run(tmp_path, python("crashing", code, ready=wrote(starts)))
    await eventually(lambda: starts.exists() and len(starts.read_text()) >= 2)
    await run.end()
    assert "ended: it ended with exit code 7 and no output; starting it again in 1 s" in run.text
    assert run.text.count("ready (") >= 1


async def test_child_that_needs_another_is_started_after_it(tmp_path: Path) -> None:
    first = python(
        "first",
        f"import time; time.sleep(0.5); open({str(tmp_path / 'first')!r}, 'w').write('x')\n{FOREVER}",
        ready=wrote(tmp_path / "first"),
    )
    second = python(
        "second",
        f"assert open({str(tmp_path / 'first')!r}).read()\n{FOREVER}",
        needs=("first",),
    )
    run = Run(tmp_path, second, first)
    await asyncio.wait_for(run.ready.wait(), 10)
    await asyncio.sleep(0.3)
    assert not run.task.done()
    await run.end()


async def test_child_that_need_not_restart_may_finish(tmp_path: Path) -> None:
    run = Run(tmp_path, python("once", "print('done')", restart=False))
    await asyncio.wait_for(run.task, 10)
    failing = Run(tmp_path, python("once", "raise SystemExit('bad')", restart=False))
    with pytest.raises(StartFailed, match="once failed: bad"):
        await asyncio.wait_for(failing.task, 10)
    assert (tmp_path / "logs" / "once.1.log").read_text() == "done\n"


async def test_stop_goes_in_reverse_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = (
        "import signal, time, sys\n"
        "def end(*_):\n"
        f"    open({str(order)!r}, 'a').write(sys.argv[1] + ' ')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"open({str(tmp_path)!r} + '/' + sys.argv[1], 'w').write('x')\n"
        "time.sleep(600)"
    )
    children = [
        Child(name, [sys.executable, "-c", code, name], ready=wrote(tmp_path / name))
        for name in ("vllm", "gateway", "trainer")
    ]
    run = Run(tmp_path, *children)
    await asyncio.wait_for(run.ready.wait(), 10)
    await run.end()
    assert order.read_text() == "trainer gateway vllm "


async def test_stop_leaves_no_grandchild(tmp_path: Path) -> None:
    kid = tmp_path / "kid"
    run = Run(tmp_path, python("family", FAMILY, cwd=tmp_path, ready=wrote(kid)))
    await asyncio.wait_for(run.ready.wait(), 10)
    pid = int(kid.read_text())
    assert alive(pid)
    await run.end()
    await eventually(lambda: not alive(pid), 2)


async def test_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    child = python("stubborn", STUBBORN, stop_timeout=0.5)
    run = Run(tmp_path, child)
    await eventually(lambda: has_text(tmp_path / "logs" / "stubborn.log"))
    began = time.monotonic()
    await run.end()
    assert 0.4 < time.monotonic() - began < 5


async def test_readiness_over_http(tmp_path: Path) -> None:
    code = (
        "import http.server, pathlib\n"
        "class Answer(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200 if self.path == '/health' else 500)\n"
        "        self.end_headers()\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), Answer)\n"
        "pathlib.Path('port').write_text(str(server.server_port))\n"
        "server.serve_forever()"
    )
    port = tmp_path / "port"
    run = Run(tmp_path, python("web", code, cwd=tmp_path))
    await eventually(lambda: has_text(port))
    url = f"http://127.0.0.1:{port.read_text()}"
    assert await http_ready(url + "/health")()
    assert not await http_ready(url + "/other")()
    await run.end()
    assert not await http_ready(url + "/health")()


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from gateway.supervisor import Child, run_children
code = Path(sys.argv[1], "family.py").read_text()
folder = Path(sys.argv[1])
child = Child("family", [sys.executable, "-c", code], cwd=folder, stop_timeout=2)
asyncio.run(run_children([child], data_dir=folder))
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> subprocess.Popen[bytes]:
    (tmp_path / "family.py").write_text(FAMILY)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", textwrap.dedent(SUPERVISOR), str(tmp_path)]
    return subprocess.Popen(command, cwd=root, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_nothing_is_left_after_a_signal(
    tmp_path: Path, supervisor: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    kid = tmp_path / "kid"
    await eventually(lambda: has_text(kid))
    pid = int(kid.read_text())
    # To the whole group, as a terminal does with Ctrl-C; the reaper must survive that.
    os.killpg(supervisor.pid, number)
    await asyncio.to_thread(supervisor.wait, 15)
    await eventually(lambda: not alive(pid), 10)
    expected = -signal.SIGKILL if number == signal.SIGKILL else 0
    assert supervisor.returncode == expected


def test_exits_are_named() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "signal 9 (SIGKILL)"
