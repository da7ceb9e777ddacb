"""`make demo`, in small: `strop up` with the real vLLM, one step, and what it leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sqlalchemy import func, select

from gateway.store import Database
from gateway.store.models import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_closes_the_loop_and_leaves_a_result(base_model: Path, tmp_path: Path):
    folder = tmp_path / "demo"
    sizes = {"steps": 1, "questions": 2, "rollouts": 6, "evaluate": 8}
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "examples.email_search.demo", "--folder", str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "STROP_BASE_MODEL": str(base_model), "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("logs/*.log")))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{logs}"
    result = json.loads((folder / "result.json").read_text())
    assert {
        "seed", "base_reward", "last_reward", "rewards_by_version", "steps", "seconds",
        "completions_answered", "completions_logged", "target_reward", "seconds_to_target",
    } <= set(result)  # fmt: skip
    assert result["completions_logged"] == result["completions_answered"] > 0
    assert 0 < result["served_trained_difference"] <= 1e-4
    assert list(result["rewards_by_version"]) == ["0"]
    assert "Mean reward on training questions" in done.stdout
    (step,) = result["seconds_by_step"]
    assert 0 <= step["began"] < step["sampled"] < step["served"] < result["seconds"]
    assert "s until it is served" in done.stdout
    database = Database(f"sqlite:///{folder / 'strop.db'}")
    with database.read() as connection:
        versions = dict(
            connection.execute(
                select(Completion.version, func.count()).group_by(Completion.version)
            ).all()
        )
        reasons = set(connection.execute(select(Completion.reason)).scalars())
    database.dispose()
    assert set(versions) == {0, 1}
    assert reasons == {None}
    # `strop up` was stopped, and nothing of it is left running.
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert [command for command in running if str(folder) in " ".join(command)] == []


def test_the_demo_does_not_delete_what_it_did_not_make(tmp_path: Path):
    (tmp_path / "mine").write_text("precious")
    done = subprocess.run(
        [sys.executable, "-m", "examples.email_search.demo", "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "did not make" in done.stderr
    assert (tmp_path / "mine").read_text() == "precious"
