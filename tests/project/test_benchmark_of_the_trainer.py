"""The trainer's benchmark runs, in small, and both sides take the same step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_both_sides_take_the_same_step(tmp_path: Path):
    file = tmp_path / "figures.json"
    command = ["-m", "benchmarks.trainer", "--quick", "--only", "agents", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    # It ends with an error where the gradients differ.
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(file.read_text())
    assert found["gradient_difference"] < 1e-4
    assert found["strop"]["way"] == "segments"
    for name in ("time_ratio", "peak_memory_ratio", "added_memory_ratio", "outside"):
        assert found[name] > 0
    assert found["outside_with_probe"] > found["outside"]
    assert "TRL ÷ strop" in done.stdout
