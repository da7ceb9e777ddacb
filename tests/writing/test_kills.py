"""kill -9 of the process that commits, and of the gateway that has it."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from sqlalchemy import func, select, text

from gateway.store import Database, outbox
from gateway.store.models import Choice, Completion, Reward
from gateway.store.rewards import NewReward
from gateway.writing.shared import SharedWriter
from tests.gateway.conftest import MakeStrop, make_strop, toy_base
from tests.store.conftest import Captured
from tests.store.test_journal import until
from tests.writing.conftest import Share

__all__ = ["make_strop", "toy_base"]

KILLS = 10


async def kill(writer: SharedWriter) -> None:
    """End the process that runs now, in the middle of whatever it does."""
    await until(lambda: writer.child.pid is not None)
    os.kill(writer.child.pid, signal.SIGKILL)


async def test_nothing_is_lost_or_doubled_by_kills(
    database: Database, share: Share, captured: Captured
):
    stored: list[str] = []
    posted: list[str] = []
    async with share(traced=("default",)) as writer:
        ended = False

        async def load(number: int) -> None:
            while not ended:
                item = captured(f"t{number}-{len(stored)}")
                await writer.store(item)
                stored.append(item.id)
                new = [NewReward(float(i), f"r{i}", completion_id=item.id) for i in range(2)]
                found, fresh = await writer.post_rewards("default", new)
                assert fresh
                assert [there.id for there in found] == [each.id for each in new]
                posted.extend(each.id for each in new)

        tasks = [asyncio.create_task(load(i)) for i in range(16)]
        chance = random.Random(7)
        for _ in range(KILLS):
            before = len(stored)
            await until(lambda before=before: len(stored) >= before + 30)
            await asyncio.sleep(0.05 * chance.random())
            await kill(writer)
        before = len(stored)
        await until(lambda: len(stored) >= before + 30)
        ended = True
        await asyncio.gather(*tasks)
    with database.read() as connection:
        assert sorted(connection.execute(select(Completion.id)).scalars()) == sorted(stored)
        assert sorted(connection.execute(select(Reward.id)).scalars()) == sorted(posted)
        choices = connection.execute(select(func.count()).select_from(Choice)).scalar_one()
        waiting = outbox.pending(connection, "default", 10 * len(posted))
    assert choices == len(stored)
    assert {entry.ref for entry in waiting} == {*stored, *posted}


async def test_a_commit_whose_answer_was_lost_is_answered_as_if_it_were_the_first(
    database: Database, share: Share, captured: Captured
):
    async with share() as writer:
        item = captured()
        await writer.store(item)
        answered, lost = writer.answered, []
        writer.answered = lambda answers, status: lost.extend(answers)
        new = NewReward(1.0, completion_id=item.id)
        reward = asyncio.create_task(writer.post_rewards("default", [new]))
        other = asyncio.create_task(writer.store(captured("u")))
        await until(lambda: len(lost) == 2)
        writer.answered = answered
        await kill(writer)
        before = writer.writes
        (found,), fresh = await reward
        assert (found.id, fresh, await other) == (new.id, True, {})
        # The second process counts from zero, and what is shown goes on.
        await until(lambda: writer.writes >= before + 2)
    with database.read() as connection:
        for table, rows in ((Completion, 2), (Choice, 2), (Reward, 1)):
            assert connection.execute(select(func.count()).select_from(table)).scalar_one() == rows


async def test_a_gateway_goes_on_when_its_process_is_killed(make_strop: MakeStrop):
    async with make_strop(writer="process") as strop:
        ask = {"model": "agent", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
        for _ in range(2):
            answers = await asyncio.gather(
                *(strop.post("/v1/chat/completions", ask) for _ in range(8)),
                kill(strop.gateway.writer),
            )
            for status, reply in answers[:-1]:
                assert status == 200, reply
                body = {"completion_id": reply["id"], "reward": 1.0}
                assert (await strop.post("/v1/rewards", body))[0] == 201
        with strop.gateway.database.read() as connection:
            rows = connection.execute(text("SELECT count(*) FROM completions")).scalar_one()
        assert rows == 16


_GATEWAY = """
import asyncio, sys
from pathlib import Path
from gateway.store import Database
from gateway.workers import Worker
from gateway.writing.shared import SharedWriter

async def main():
    database = Database(f"sqlite:///{sys.argv[1]}/strop.db")
    database.migrate()
    writer = SharedWriter(database, Worker(Path(sys.argv[1]), 1), 512, 100, 7.0, ())
    writer.start()
    while writer._transport is None or writer.child.pid is None:
        await asyncio.sleep(0.01)
    print(writer.child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_process_ends_with_a_gateway_that_is_killed(tmp_path: Path):
    command = [sys.executable, "-c", _GATEWAY, str(tmp_path)]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    pid = int(gateway.stdout.readline())
    os.kill(pid, 0)
    gateway.kill()
    gateway.wait()
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        # Where nobody reaps orphans it stays as a zombie.
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
