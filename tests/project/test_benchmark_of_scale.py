"""The benchmark of a full database runs, in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_it_asks_all_questions_and_all_pages_and_can_ask_again(tmp_path: Path):
    file = tmp_path / "figures.json"
    options = ["--completions", "4000", "--rounds", "2", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks.scale", *options, "--keep", str(tmp_path / "pg")]
    for again in (False, True):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(file.read_text())
        assert found["completions"] == 4000
        assert (found["fill_seconds"] is None) == again
    assert {"listing: the newest", "reading a trajectory", "claiming a group"} <= set(
        found["questions"]
    )
    assert {"overview", "policy", "groups", "trajectory", "steps"} <= set(found["pages"])
    for row in (*found["questions"].values(), *found["pages"].values()):
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["most_ms"]
    assert "claiming a group" in done.stdout
