"""How fast is sent while the gateway is busy, and when it is not."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.store import Database
from gateway.tracing.pace import LATE_SHARE, LEAST_SHARE, Idle, Meter, Pace
from gateway.tracing.writes import Writes, lower_priority


class Time:
    """A clock, and CPU time, that a test moves."""

    def __init__(self) -> None:
        self.at, self.used = 100.0, 7.0

    def pace(self, lag_seconds: float = 60.0) -> Pace:
        return Pace(lag_seconds, lambda: self.at, lambda: self.used, lambda: 1000.0 + self.at)

    def work(self, seconds: float) -> None:
        self.at += seconds
        self.used += seconds


def test_while_the_gateway_is_idle_nothing_is_waited_for():
    clock = Time()
    pace = clock.pace()
    pace.told(0.0)
    for _ in range(5):
        clock.work(0.3)
        assert pace.left(None) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("busy", "share"), [(0.25, 0.75), (0.5, 0.5), (0.99, LEAST_SHARE), (3.7, LEAST_SHARE)]
)
def test_what_is_used_over_time_is_what_the_gateway_leaves(busy: float, share: float):
    clock = Time()
    pace = clock.pace()
    pace.told(busy)
    began, used = clock.at, clock.used
    for _ in range(100):
        clock.work(0.2)
        clock.at += pace.left(None)
    assert (clock.used - used) / (clock.at - began) == pytest.approx(share)


def test_when_the_gateway_gets_idle_the_wait_is_over():
    clock = Time()
    pace = clock.pace()
    pace.told(1.0)
    clock.work(0.4)
    assert pace.left(None) == pytest.approx(0.4 * 0.95 / LEAST_SHARE)
    clock.at += 1.0
    pace.told(0.0)
    assert pace.left(None) == pytest.approx(0.33)


def test_no_batch_is_waited_for_without_end():
    clock = Time()
    pace = clock.pace()
    pace.told(1.0)
    clock.work(3600.0)
    assert pace.left(None) == pytest.approx(10.0)


@pytest.mark.parametrize("room", [0.0, 0.6])
def test_what_has_waited_for_long_gets_more_and_not_all(room: float):
    clock = Time()
    pace = clock.pace(lag_seconds=60.0)
    pace.told(1.0, room)
    began, used = clock.at, clock.used
    for _ in range(100):
        clock.work(0.2)
        clock.at += pace.left(1000.0 + clock.at - 61.0)
    assert (clock.used - used) / (clock.at - began) == pytest.approx(LATE_SHARE, rel=0.01)
    assert pace.left(1000.0 + clock.at - 59.0) == 0.0
    clock.work(0.2)
    young = pace.left(1000.0 + clock.at - 59.0)
    assert young > 1.4 * pace.left(1000.0 + clock.at - 60.0) > 0


def test_without_a_lag_nothing_is_waited_for():
    clock = Time()
    pace = clock.pace(lag_seconds=0.0)
    pace.told(1.0)
    clock.work(0.4)
    assert pace.left(1000.0 + clock.at) == pace.left(None) == 0.0


@pytest.mark.parametrize(("room", "share"), [(15.0, 1.0), (1.0, 0.5), (0.3, LEAST_SHARE)])
def test_idle_cores_are_used_but_for_half_a_core(room: float, share: float):
    clock = Time()
    pace = clock.pace()
    pace.told(1.0, room)
    began, used = clock.at, clock.used
    for _ in range(100):
        clock.work(0.2)
        clock.at += pace.left(None)
    assert (clock.used - used) / (clock.at - began) == pytest.approx(share)


def test_idle_cores_are_counted(tmp_path: Path):
    # Where the system does not say, none are.
    assert Idle(str(tmp_path / "none")).cores() == 0.0
    stat = tmp_path / "stat"
    stat.write_text("nothing like it\n")
    assert Idle(str(stat)).cores() == 0.0
    tick = os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu  1 2 3 {100 * tick} 5\ncpu0 1 2 3 4 5\n")
    idle = Idle(str(stat))
    time.sleep(0.05)
    stat.write_text(f"cpu  1 2 3 {103 * tick} 5\n")
    assert 3 / 10 < idle.cores() <= 3 / 0.05


def test_a_wait_ends_when_it_is_told_to():
    pace, stop = Pace(1e9, used=lambda: time.monotonic()), threading.Event()
    pace.told(1.0)
    time.sleep(0.01)
    stop.set()
    pace.wait(stop, None)
    assert pace.left(None) > 0


def test_a_meter_reads_the_share_of_a_core_that_was_used():
    meter = Meter()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    busy = meter.share()
    assert busy > 0.0
    time.sleep(0.2)
    assert meter.share() < busy


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_a_transaction_is_not_put_aside_with_the_lock(database: Database):
    def niceness(_: object = None) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    writes = Writes(database)

    def channel() -> tuple[int, int]:
        lower_priority()
        return niceness(), writes.run(niceness)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(channel).result() == (19, niceness())
    writes.close()
    assert niceness() < 19
