"""Judges groups in the background: whose policy has a judge, and which nobody rewards.

One gateway does it, whichever holds the lease. What was asked and answered is in the database
before anything follows from it, so that a restart pays for no question twice.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.judge import groups, prompt
from gateway.judge.asking import Asker, NotNow
from gateway.judge.groups import Due
from gateway.judge.prompt import Candidate, Unusable
from gateway.store import Database, codec, leases, policies, queries
from gateway.store.journal import connection_lost
from gateway.store.judge_settings import Judge
from gateway.store.policy_settings import PolicySettings
from gateway.store.records import Json
from gateway.store.rewards import NewReward
from gateway.store.writer import Writer

log = logging.getLogger("strop.judge")

_LEASE_SECONDS = 300.0
_RETRIES = 8
"""Times that a group waits for a judge that cannot be asked."""

_FIRST_WAIT = 15.0
_LONGEST_WAIT = 3600.0
_BUDGET_WAIT = 300.0


class _OverBudget(Exception):
    pass


@dataclass(slots=True, frozen=True)
class _Case:
    """One group before its judge."""

    project: str
    policy: str
    judge: Judge
    group: Due
    candidates: list[Candidate]
    digest: bytes
    presentations: list[list[Json]]
    errors: list[str] = field(default_factory=list)


class Judging:
    """Looks for groups to judge, again and again."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        asker: Asker,
        *,
        traced: Collection[str] = (),
        poll: float = 2.0,
    ):
        self._database = database
        self._writer = writer
        self._asker = asker
        self._traced = traced
        self._poll = poll
        self._owner = leases.new_owner()
        self._over_budget: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Judge until cancelled."""
        while True:
            try:
                await self.look()
            except Exception as error:
                # While the database is away others say so.
                if not connection_lost(error):
                    log.exception("judging failed; trying again")
            await asyncio.sleep(self._poll)

    async def look(self) -> int:
        """Judge what is due; returns how many groups were looked at."""
        count = 0
        for project, policy, settings in await asyncio.to_thread(self._judged_policies):
            if not await self._hold():
                return count
            for group in await asyncio.to_thread(self._due, project, policy, settings):
                await self._hold()
                count += 1
                try:
                    await self._judge(project, policy, settings, group)
                except Exception:
                    # Those behind it do not wait for it.
                    log.exception("%s of %s cannot be judged; trying again", group.id, policy)
        return count

    async def _hold(self) -> bool:
        return await self._writer.run(
            lambda c: leases.take(c, "judge", self._owner, _LEASE_SECONDS, time.time())
        )

    def _judged_policies(self) -> list[tuple[str, str, PolicySettings]]:
        with self._database.read() as connection:
            rows = queries.all_policies(connection)
        found = [(row["project"], row["name"], row["settings"]) for row in rows]
        return [(p, n, PolicySettings(**s)) for p, n, s in found if s.get("judge")]

    def _due(self, project: str, policy: str, settings: PolicySettings) -> list[Due]:
        with self._database.read() as connection:
            return groups.due(connection, project, policy, settings, time.time())

    async def _judge(self, project: str, policy: str, settings: PolicySettings, group: Due) -> None:
        judge = settings.judge
        assert judge is not None
        case = await asyncio.to_thread(self._case, project, policy, judge, group)
        members = sum(len(each.trajectories) for each in case.candidates)
        if members < 2 or (group.digest == case.digest and group.state in ("done", "failed")):
            state = group.state if group.digest == case.digest and group.state else "done"
            await self._settle(case, state, group.updated_at)
            return
        try:
            rankings = await self._rankings(case)
        except _OverBudget:
            await self._settle(case, "waiting", time.time() + _BUDGET_WAIT, group.attempts)
            return
        except NotNow as error:
            await self._wait(case, str(error))
            return
        if 2 * len(rankings) < max(1, len(case.presentations)):
            await self._give_up(case, "; ".join(dict.fromkeys(case.errors)))
            return
        await self._post(case, rankings)

    def _case(self, project: str, policy: str, judge: Judge, group: Due) -> _Case:
        with self._database.read() as connection:
            found = groups.conversations(connection, project, policy, group.id, judge.over_people)
        made = prompt.candidates(found, judge, group.id)
        shown = [[each.id, each.trajectories, each.messages] for each in made]
        options = judge.model_dump(exclude={"budget", "calls", "settle_seconds"})
        digest = codec.digest_json([options, shown])
        orders = prompt.presentations(made, judge, digest.hex()) if len(made) > 1 else []
        return _Case(project, policy, judge, group, made, digest, orders)

    async def _rankings(self, case: _Case) -> list[list[Json]]:
        """One ranking for each presentation that was answered with one."""
        if len(case.candidates) == 1:
            # All gave the same answer; there is nothing to ask.
            return [[{"id": case.candidates[0].id, "reason": "all attempts are the same"}]]
        judge, shown = case.judge, case.presentations
        if judge.budget is not None or judge.calls is not None:
            # One after the other, so that none is asked that is over the budget.
            asked = [await self._ranking(case, messages) for messages in shown]
            return [ranking for ranking in asked if ranking is not None]
        found = await asyncio.gather(
            *(self._ranking(case, messages) for messages in shown), return_exceptions=True
        )
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return [result for result in found if isinstance(result, list)]

    async def _ranking(self, case: _Case, messages: list[Json]) -> list[Json] | None:
        judge = case.judge
        for _ in range(judge.attempts):
            body = {
                "model": judge.model,
                "messages": messages,
                "temperature": judge.temperature,
                "max_tokens": judge.max_tokens,
            }
            key = codec.digest_json([case.project, body])
            known = await asyncio.to_thread(self._cached, key)
            if known is not None:
                return list(known["ranking"])
            await self._check_budget(case)
            answer = await self._asker.ask(case.project, body)
            ranking, problem = None, None
            try:
                ranking = prompt.ranking(answer.body, case.candidates)
            except Unusable as unusable:
                problem = str(unusable)
            await self._record(case, key, ranking, problem, answer.cost)
            if ranking is not None:
                return ranking
            case.errors.append(str(problem))
            messages = [*messages, *_corrections(answer.body, str(problem))]
        return None

    def _cached(self, key: bytes) -> Json | None:
        with self._database.read() as connection:
            return groups.cached(connection, key)

    async def _record(
        self,
        case: _Case,
        key: bytes,
        ranking: list[Json] | None,
        problem: str | None,
        cost: float,
    ) -> None:
        values: dict[str, Any] = {
            "project": case.project,
            "policy": case.policy,
            "group_id": case.group.id,
            "key": key,
            "answer": {"ranking": ranking} if ranking is not None else None,
            "error": problem,
            "cost": cost,
            "at": time.time(),
        }
        await self._writer.run(lambda c: groups.record(c, **values))

    async def _check_budget(self, case: _Case) -> None:
        judge, key = case.judge, (case.project, case.policy)
        if judge.budget is None and judge.calls is None:
            return

        def read() -> tuple[float, int]:
            with self._database.read() as connection:
                return groups.spent(connection, case.project, case.policy, time.time())

        cost, calls = await asyncio.to_thread(read)
        if (judge.budget is None or cost < judge.budget) and (
            judge.calls is None or calls < judge.calls
        ):
            self._over_budget.discard(key)
            return
        if key not in self._over_budget:
            self._over_budget.add(key)
            detail = {"group": case.group.id, "cost": cost, "calls": calls}
            log.warning("the judge of %s has used up its budget: %s", case.policy, detail)
            await self._event(case, "judge_over_budget", detail)
        raise _OverBudget

    async def _post(self, case: _Case, rankings: Sequence[Sequence[Json]]) -> None:
        judge, now = case.judge, time.time()
        found = prompt.verdicts(rankings)
        same = len(case.candidates) == 1
        rewards = [
            NewReward(
                0.5 if same else found[each.id].reward,
                judge.reward,
                trajectory_id=trajectory_id,
                comment="\n".join(dict.fromkeys(found[each.id].reasons)) or None,
                metadata={
                    "judge": judge.model,
                    "compared": len(case.candidates),
                    "presentations": len(rankings),
                },
                idempotency_key=f"judge:{case.digest.hex()}:{trajectory_id}",
                source=groups.SOURCE,
            )
            for each in case.candidates
            for trajectory_id in each.trajectories
        ]

        def settle(connection: Any) -> int:
            posted = groups.post(
                connection,
                case.project,
                rewards,
                over_people=judge.over_people,
                traced=case.project in self._traced,
                now=now,
            )
            groups.settle(
                connection,
                case.project,
                case.policy,
                case.group.id,
                digest=case.digest,
                state="done",
                not_before=case.group.updated_at,
            )
            return posted

        posted = await self._writer.run(settle)
        log.info("%s of %s is judged: %d rewards", case.group.id, case.policy, posted)

    async def _wait(self, case: _Case, error: str) -> None:
        attempts = case.group.attempts + 1
        if attempts >= _RETRIES:
            await self._give_up(case, error, attempts)
            return
        log.warning("the judge of %s cannot be asked: %s", case.policy, error)
        seconds = min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempts)
        await self._settle(case, "waiting", time.time() + seconds, attempts, error)

    async def _give_up(self, case: _Case, error: str, attempts: int = 0) -> None:
        log.error("%s of %s is left without a reward: %s", case.group.id, case.policy, error)
        await self._event(case, "judge_failed", {"group": case.group.id, "error": error[:1000]})
        await self._settle(case, "failed", case.group.updated_at, attempts, error)

    async def _event(self, case: _Case, kind: str, detail: Mapping[str, Any]) -> None:
        await self._writer.run(
            lambda c: policies.event(c, case.project, case.policy, kind, None, dict(detail))
        )

    async def _settle(
        self,
        case: _Case,
        state: str,
        not_before: float,
        attempts: int = 0,
        error: str | None = None,
    ) -> None:
        await self._writer.run(
            lambda c: groups.settle(
                c,
                case.project,
                case.policy,
                case.group.id,
                digest=case.digest,
                state=state,
                not_before=not_before,
                attempts=attempts,
                error=error,
            )
        )


def _corrections(body: Json, problem: str) -> list[Json]:
    try:
        said = str(body["choices"][0]["message"].get("content") or "")
    except (KeyError, IndexError, TypeError, AttributeError):
        said = ""
    again = f"That cannot be used. {problem} Answer again, with JSON alone, each id once."
    return [
        {"role": "assistant", "content": said[:4000] or "(nothing)"},
        {"role": "user", "content": again},
    ]
