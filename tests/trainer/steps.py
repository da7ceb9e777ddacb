"""Steps as the worker records them, without a model."""

from pathlib import Path

from gateway.store import claims, training
from tests.trainer.tiny import Log
from trainer.plan import Plan, make_plan


def plan_of(log: Log, worker: str = "w", scale: str = "none") -> Plan:
    return make_plan(log.policy, log.claim(worker), log.settings, scale)


def record(log: Log, plan: Plan, worker: str = "w") -> int:
    """Record a plan as a step that was taken; returns the step's id."""
    step = training.begin_step(log.database, log.policy, worker, {})
    number = training.next_version(log.database, log.policy)
    training.finish_step(
        log.database,
        log.policy,
        step,
        worker,
        number=number,
        adapter_path=Path("/adapter"),
        probe={},
        metrics=plan.metrics(),
        groups=[group.claimed for group in plan.groups],
        outcomes=[outcome for group in plan.groups for outcome in group.outcomes],
        uses=[use for group in plan.groups for use in group.uses],
    )
    return step


def skip(log: Log, plan: Plan, worker: str = "w") -> None:
    for group in plan.groups:
        training.skip_groups(log.database, [group.claimed], worker, group.outcomes, group.uses)


def release(log: Log, plan: Plan, worker: str = "w") -> None:
    claims.release_groups(log.database, [group.claimed for group in plan.groups], worker)


def outcomes(plan: Plan) -> dict[str, str | None]:
    return {o.trajectory_id: o.reason for group in plan.groups for o in group.outcomes}


def taught(plan: Plan) -> dict[str, float]:
    """Advantage of every completion that a plan trains on."""
    return {
        use.completion_id: round(use.advantage, 6)
        for group in plan.groups
        for use in group.uses
        if use.advantage is not None
    }
