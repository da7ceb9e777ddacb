"""`python -m trainer`, as a process."""

import os
import signal
import subprocess
import sys


def run_process(log, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments],
        env={
            **os.environ,
            "STROP_CONFIG": "/none.toml",
            "STROP_DATABASE_URL": log.url,
            "STROP_ARTIFACTS_DIR": str(log.artifacts),
            "STROP_TRAINER_DEVICE": "cpu",
            **environment,
        },
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_trains_once_and_says_so_in_one_line(make_log, base_model):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    process = run_process(log, "--once", "--policy", "agent")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert sum("agent@1 step=1 groups=1" in line for line in errors.splitlines()) == 1
    assert log.policy.head == 1


def test_the_command_ends_in_peace_when_it_is_asked_to(make_log):
    log = make_log()
    process = run_process(log, STROP_TRAINER_LOG_LEVEL="info")
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting for groups" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
