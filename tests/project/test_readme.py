"""What the README says can be done can be done."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.conftest import Running

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


async def test_the_shortest_example_runs(strop: Running):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "http://localhost:8000" in code
    code = code.replace("http://localhost:8000", strop.url) + "\nprint(reply.id)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    _, body = await strop.get(f"/v1/rewards?completion_id={output.decode().strip()}")
    assert [reward["reward"] for reward in body["data"]] == [1.0]


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) | {"demo", "test"}
    assert {"setup", "demo", "test", "lint", "bench"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_that_it_points_to_exist():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


def test_every_reason_that_it_lists_is_one_that_the_code_gives():
    code = "".join(
        path.read_text() for room in ("gateway", "trainer") for path in (ROOT / room).rglob("*.py")
    )
    table = README.split("## Why a completion is not trained on")[1].split("##")[0]
    reasons = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(reasons) == 11
    for reason in reasons:
        assert f'"{reason}"' in code, reason


def test_every_route_that_it_lists_is_served():
    from gateway.app import build

    paths = {getattr(route, "path", "") for route in build().routes}
    schema = set(build().openapi()["paths"])
    table = README.split("## Looking at it")[1].split("## Settings")[0]
    for path in re.findall(r"`(?:GET |POST )?(/[^`?]+)`", table):
        known = {re.sub(r"\{[^}]*\}", "{}", found) for found in paths | schema}
        assert re.sub(r"\{[^}]*\}", "{}", path) in known, path


@pytest.mark.parametrize(
    "module", ["benchmarks.storage", "benchmarks.gateway", "benchmarks.tracing"]
)
def test_the_benchmarks_run(module, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", module, "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 5
