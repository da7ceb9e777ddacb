"""Judging, with judges that answer well, badly, late, and not at all."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from gateway.judge.asking import Answer, NotNow
from gateway.judge.judging import Judging
from gateway.store import Database, outbox, policies, queries
from gateway.store.judge_settings import Judge
from gateway.store.models import Event, Group
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.records import StoredReward
from gateway.store.rewards import NewReward
from gateway.store.tracing_models import JudgeCall, JudgedGroup
from gateway.store.writer import Writer
from tests.store.conftest import Captured
from tests.store.conftest import captured as captured
from tests.store.conftest import database as database
from tests.store.conftest import empty_url as empty_url
from tests.store.conftest import postgres as postgres
from tests.tracing.conftest import writer as writer

WORTH = {"bad": 0, "fair": 1, "good": 2, "best": 3}
"""What the fake judge thinks of answers that end so."""

SYSTEM = {"role": "system", "content": "You are the agent of a shop."}
Reply = Callable[[list[str], dict[str, str]], Any]


def ranked(names: list[str], texts: dict[str, str]) -> dict[str, Any]:
    """The right answer."""
    best = sorted(names, key=lambda n: -WORTH[texts[n].split()[-1]])
    return {"ranking": [{"id": n, "reason": f"it says {texts[n]}"} for n in best]}


def chat(content: Any, **message: Any) -> dict[str, Any]:
    text = content if isinstance(content, str | None) else json.dumps(content)
    return {
        "choices": [
            {"message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
        ]
    }


class FakeJudge:
    """Answers with what `replies` holds, and rightly when that is used up."""

    def __init__(self, *replies: Any, cost: float = 0.0):
        self.replies = list(replies)
        self.cost = cost
        self.bodies: list[dict[str, Any]] = []

    async def ask(self, project: str, body: dict[str, Any]) -> Answer:
        self.bodies.append(body)
        shown = body["messages"][1]["content"]
        texts = dict(
            re.findall(r"<attempt id=(\w+)>\n\[assistant\]\n(.*?)\n</attempt", shown, re.S)
        )
        reply = self.replies.pop(0) if self.replies else ranked
        if isinstance(reply, Exception):
            raise reply
        found = reply(list(texts), texts) if callable(reply) else reply
        whole = isinstance(found, dict) and "choices" in found
        return Answer(found if whole else chat(found), self.cost)

    @property
    def shown(self) -> list[str]:
        return [body["messages"][1]["content"] for body in self.bodies]


class Court:
    """Everything that a test of judging needs."""

    def __init__(self, database: Database, writer: Writer, captured: Captured):
        self.database, self.writer, self.captured = database, writer, captured
        self._judging: Judging | None = None

    async def policy(self, **judge: Any) -> None:
        options = {"model": "big", "settle_seconds": 0.0, **judge}
        settings = PolicySettings(group_size=2, judge=Judge(**options))
        await self.writer.run(
            lambda c: policies.create(
                c, "default", "agent", base_model="/b", base_served="b", lora=Lora(),
                settings=settings, adapter_path=None,
            )
        )  # fmt: skip

    async def configure(self, **judge: Any) -> None:
        options = {"model": "big", "settle_seconds": 0.0, **judge}
        settings = PolicySettings(group_size=2, judge=Judge(**options))
        await self.writer.run(lambda c: policies.configure(c, "default", "agent", settings))

    async def answers(self, *texts: str, group: str = "g", first: int = 0) -> None:
        now = time.time() - 60
        for number, text in enumerate(texts, first):
            response = chat(text)
            await self.writer.store(
                self.captured(
                    f"{group}-{number}", group, messages=[SYSTEM, {"role": "user", "content": "Sell."}],
                    response=response, created_at=now + number, finished_at=now + number + 0.5,
                )
            )  # fmt: skip

    def judging(self, fake: FakeJudge) -> Judging:
        return Judging(self.database, self.writer, fake, traced=["default"])  # type: ignore[arg-type]

    async def judge(self, fake: FakeJudge) -> int:
        if self._judging is None:
            self._judging = self.judging(fake)
        self._judging._asker = fake  # type: ignore[assignment]
        return await self._judging.look()

    def rewards(self, trajectory: str) -> list[StoredReward]:
        with self.database.read() as connection:
            return queries.rewards_of(connection, "default", trajectory, None)

    def values(self, group: str = "g", count: int = 4) -> list[float | None]:
        found = [self.rewards(f"{group}-{n}") for n in range(count)]
        return [each[-1].reward if each else None for each in found]

    def state(self, group: str = "g") -> tuple[str, str | None]:
        with self.database.read() as connection:
            query = select(JudgedGroup.state, JudgedGroup.error)
            row = connection.execute(query.where(JudgedGroup.group_id == group)).one()
        return row.state, row.error

    def events(self) -> list[str]:
        with self.database.read() as connection:
            return list(connection.execute(select(Event.kind)).scalars())


@pytest.fixture
def court(database: Database, writer: Writer, captured: Captured) -> Court:
    return Court(database, writer, captured)


async def test_members_are_ranked_and_rewarded(court: Court):
    await court.policy()
    await court.answers("it is fair", "it is bad", "it is best", "it is good")
    judge = FakeJudge(cost=0.01)
    assert await court.judge(judge) == 1
    assert court.values() == pytest.approx([1 / 3, 0.0, 1.0, 2 / 3])
    (reward,) = court.rewards("g-2")
    assert (reward.name, reward.source, reward.comment) == ("judge", "judge", "it says it is best")
    assert reward.metadata == {"judge": "big", "compared": 4, "presentations": 3}
    with court.database.read() as connection:
        assert sum(connection.execute(select(JudgeCall.cost)).scalars()) == pytest.approx(0.03)
        kinds = [entry.kind for entry in outbox.pending(connection, "default", 99)]
    assert kinds.count("reward") == 4
    # Judged once, it is not judged again.
    assert await court.judge(judge) == 0
    assert len(judge.bodies) == 3


async def test_every_presentation_has_another_order_and_what_is_shared_is_shown_once(court: Court):
    await court.policy(presentations=4)
    await court.answers("a bad", "b fair", "c good", "d best")
    judge = FakeJudge()
    await court.judge(judge)
    orders = [tuple(re.findall(r"<attempt id=(\w+)>", text)) for text in judge.shown]
    assert len(set(orders)) == 4
    assert len({frozenset(order) for order in orders}) == 1
    assert len({order[0] for order in orders}) > 1
    for text in judge.shown:
        assert text.count(SYSTEM["content"]) == 1
        assert text.count("Sell.") == 1
        assert not re.search(r"g-\d", text), "ids say nothing of the order in which members came"


async def test_a_judge_that_looks_at_the_place_alone_is_averaged_out(court: Court):
    await court.policy(presentations=4)
    await court.answers("a bad", "b fair", "c good", "d best")
    first_wins = [lambda names, texts: {"ranking": [{"id": n, "reason": ""} for n in names]}] * 4
    await court.judge(FakeJudge(*first_wins))
    values = [value for value in court.values() if value is not None]
    assert max(values) - min(values) < 0.75
    assert sum(values) == pytest.approx(2.0)


def swap(change: Callable[[list[dict[str, Any]]], Any]) -> Reply:
    def reply(names: list[str], texts: dict[str, str]) -> Any:
        found = ranked(names, texts)
        return {"ranking": change(found["ranking"])}

    return reply


BAD: dict[str, Any] = {
    "refusal": chat(None, refusal="I cannot help with that."),
    "words": "I would rather not rank people.",
    "empty": chat(""),
    "null": chat(None),
    "no choices": {"choices": []},
    "filtered": {"choices": [{"message": {"content": "x"}, "finish_reason": "content_filter"}]},
    "cut": lambda names, texts: json.dumps(ranked(names, texts))[:-20],
    "missing": swap(lambda r: r[1:]),
    "invented": swap(lambda r: [*r[1:], {"id": "m00000000", "reason": ""}]),
    "doubled": swap(lambda r: [r[0], *r]),
    "by position": swap(lambda r: [{"id": n, "reason": ""} for n in range(len(r))]),
    "not objects": swap(lambda r: [item["id"] for item in r]),
    "a number": {"ranking": 7},
}


async def test_what_cannot_be_used_is_asked_again(court: Court):
    await court.policy(presentations=1, attempts=3)
    for name, bad in BAD.items():
        await court.answers("it is good", "it is bad", group=name)
        judge = FakeJudge(bad, bad)
        await court.judge(judge)
        assert court.values(name, 2) == [1.0, 0.0], name
        assert len(judge.bodies) == 3, name
        assert "cannot be used" in judge.bodies[-1]["messages"][-1]["content"]


async def test_what_can_never_be_used_leaves_the_group_without_a_reward(court: Court):
    await court.policy(presentations=1, attempts=2)
    for number, (name, bad) in enumerate(BAD.items(), 1):
        await court.answers("it is good", "it is bad", group=name)
        judge = FakeJudge(bad, bad)
        await court.judge(judge)
        assert court.values(name, 2) == [None, None], name
        assert court.state(name)[0] == "failed", name
        assert court.events() == ["judge_failed"] * number
        assert await court.judge(judge) == 0
    # With a new member it is another question.
    await court.answers("it is best", group=name, first=2)
    await asyncio.to_thread(touch, court.database)
    await court.judge(FakeJudge())
    assert court.values(name, 3) == [0.5, 0.0, 1.0]


def touch(database: Database) -> None:
    with database.write() as connection:
        connection.execute(update(Group).values(updated_at=time.time() - 1))


async def test_json_among_words_is_found(court: Court):
    await court.policy(presentations=1)
    await court.answers("it is good", "it is bad")
    await court.judge(
        FakeJudge(
            lambda n, t: f"Let me think [1]. ```json\n{json.dumps(ranked(n, t))}\n``` Done {{}}"
        )
    )
    assert court.values(count=2) == [1.0, 0.0]


async def test_most_presentations_are_enough(court: Court):
    await court.policy(presentations=3, attempts=1)
    await court.answers("it is good", "it is bad")
    await court.judge(FakeJudge("no", ranked, ranked))
    assert court.values(count=2) == [1.0, 0.0]
    await court.answers("it is good", "it is bad", group="h")
    await court.judge(FakeJudge("no", "no", ranked))
    assert court.values("h", 2) == [None, None]


async def test_what_others_have_rewarded_is_not_judged_unless_it_is_asked_for(court: Court):
    await court.policy()
    await court.answers("it is bad", "it is good", "it is best")
    await court.writer.post_rewards("default", [NewReward(1.0, trajectory_id="g-0")])
    judge = FakeJudge()
    await court.judge(judge)
    assert court.values(count=3) == [1.0, 0.0, 1.0]
    assert [r.source for r in court.rewards("g-0")] == ["api"]
    assert "it is bad" not in judge.shown[0]
    await court.configure(over_people=True)
    await asyncio.to_thread(touch, court.database)
    await court.judge(FakeJudge())
    assert [(r.name, r.reward) for r in court.rewards("g-0")] == [("reward", 1.0), ("judge", 0.0)]


async def test_a_trajectory_that_ends_with_several_choices_is_not_judged(court: Court):
    await court.policy()
    await court.answers("it is good", "it is bad")
    choices = [{"index": i, "message": {"content": f"choice {i}"}} for i in range(2)]
    now = time.time() - 50
    await court.writer.store(
        court.captured("g-2", "g", response={"choices": choices}, created_at=now, finished_at=now)
    )
    judge = FakeJudge()
    assert await court.judge(judge) == 1
    assert [value is None for value in court.values(count=3)] == [False, False, True]
    assert not any("choice" in shown for shown in judge.shown)


async def test_a_person_who_is_faster_than_the_judge_wins(court: Court):
    await court.policy(presentations=1)
    await court.answers("it is bad", "it is good")

    class Slow(FakeJudge):
        async def ask(self, project: str, body: dict[str, Any]) -> Answer:
            await court.writer.post_rewards("default", [NewReward(0.9, trajectory_id="g-0")])
            return await super().ask(project, body)

    await court.judge(Slow())
    assert [(r.name, r.reward) for r in court.rewards("g-0")] == [("reward", 0.9)]
    assert [(r.name, r.reward) for r in court.rewards("g-1")] == [("judge", 1.0)]


async def test_members_with_the_same_answer_are_shown_once_and_get_the_same(court: Court):
    await court.policy()
    await court.answers("it is good", "it is good", "it is bad")
    judge = FakeJudge()
    await court.judge(judge)
    assert judge.shown[0].count("it is good") == 1
    assert court.values(count=3) == [1.0, 1.0, 0.0]
    await court.answers("it is good", "it is good", group="h")
    nobody = FakeJudge()
    await court.judge(nobody)
    assert nobody.bodies == []
    assert court.values("h", 2) == [0.5, 0.5]


async def test_a_judge_that_is_away_is_asked_later_and_what_it_said_is_not_asked_again(
    court: Court,
):
    await court.policy(presentations=2)
    await court.answers("it is bad", "it is good")
    judge = FakeJudge(ranked, NotNow("503"))
    await court.judge(judge)
    assert court.values(count=2) == [None, None]
    assert court.state() == ("waiting", "503")
    assert await court.judge(judge) == 0, "not at once"
    with court.database.write() as connection:
        connection.execute(update(JudgedGroup).values(not_before=0.0))
    assert await court.judge(judge) == 1
    assert court.values(count=2) == [0.0, 1.0]
    assert len(judge.bodies) == 3, "one of the two answers was there already"
    for _ in range(2):
        assert await court.judge(judge) == 0


async def test_a_judge_that_stays_away_leaves_no_reward(court: Court):
    await court.policy(presentations=1)
    await court.answers("it is bad", "it is good")
    for _ in range(8):
        await court.judge(FakeJudge(NotNow("gone")))
        with court.database.write() as connection:
            connection.execute(
                update(JudgedGroup).where(JudgedGroup.state == "waiting").values(not_before=0.0)
            )
    assert court.state() == ("failed", "gone")
    assert court.events() == ["judge_failed"]


@pytest.mark.parametrize(
    ("limit", "asked"), [({"budget": 0.25}, 3), ({"calls": 2}, 2), ({"budget": 0}, 0)]
)
async def test_the_budget_holds(court: Court, limit: dict[str, Any], asked: int):
    await court.policy(presentations=2, **limit)
    await court.answers("it is bad", "it is good")
    await court.answers("it is bad", "it is good", group="h")
    judge = FakeJudge(cost=0.1)
    await court.judge(judge)
    assert len(judge.bodies) == asked
    assert court.values("h", 2) == [None, None]
    assert court.state("h")[0] == "waiting"
    assert court.events() == ["judge_over_budget"]
    with court.database.write() as connection:
        connection.execute(update(JudgeCall).values(at=JudgeCall.at - 90_000))
        connection.execute(
            update(JudgedGroup).where(JudgedGroup.state == "waiting").values(not_before=0.0)
        )
    await court.configure(presentations=2)
    await court.judge(judge)
    assert court.values("h", 2) == [0.0, 1.0]


async def test_groups_wait_until_they_are_whole_and_quiet(court: Court):
    await court.policy(settle_seconds=3600.0)
    await court.answers("it is bad", "it is good")
    await court.answers("it is alone good", group="single")
    judge = FakeJudge()
    assert await court.judge(judge) == 0
    await court.configure(settle_seconds=0.0)
    assert await court.judge(judge) == 1
    assert court.rewards("single-0") == []


async def test_of_two_gateways_one_judges(court: Court):
    await court.policy()
    await court.answers("it is bad", "it is good")
    judge = FakeJudge()
    found = await asyncio.gather(court.judging(judge).look(), court.judging(judge).look())
    assert sorted(found) == [0, 1]
    assert len(judge.bodies) == 2, "two answers have two orders"
