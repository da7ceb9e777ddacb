"""The background loop: claim groups, learn from them, write a version, record it.

    for every policy that is not paused
        claim the groups that are ready                     (under a lease)
        decide what is trained on, and why the rest is not  (plan)
        nothing to learn: say so, take no step
        take one optimiser step                             (learner)
        write the version, whole or not at all              (checkpoints)
        record step, version and what became of all data    (one transaction)

The process may be killed at any point: what was not recorded did not happen, and its groups come
back when their lease runs out. Serving the version is the gateway's part.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from gateway.store import Database, claims, policy_leases, training
from gateway.store.claims import ClaimedGroup, TrainablePolicy
from gateway.store.ids import new_id
from gateway.store.policy_settings import PolicySettings
from gateway.store.training import Superseded
from trainer import checkpoints, memory, replay, retention
from trainer.arguments import scale_rewards
from trainer.failures import NOT_FINITE, STOPPED, explain, sentence
from trainer.learner import Learner, Stepped, TooLong, identity
from trainer.leases import LeaseKeeper
from trainer.plan import Plan, PlannedGroup, claim_limit, make_plan
from trainer.recipe import recipe_of
from trainer.reporting import Reporter
from trainer.settings import TrainerSettings
from trainer.staleness import drop_aged

log = logging.getLogger("strop.trainer")

_Key = tuple[str, str]


class Visit(Enum):
    """What came of looking after a policy once."""

    NOTHING = "nothing was ready"
    SKIPPED = "what was ready had nothing to teach"
    STEPPED = "a step was taken"
    FAILED = "a step failed"


@dataclass(slots=True)
class _Backoff:
    failures: int
    until: float


class Worker:
    """Trains every active policy of a database, one step at a time."""

    def __init__(
        self,
        database: Database,
        artifacts: Path,
        settings: TrainerSettings,
        *,
        only: str | None = None,
        until_version: int | None = None,
        make_learner: Callable[[TrainablePolicy, TrainerSettings, Path], Learner] = Learner,
    ):
        """Nothing is loaded yet.

        Args:
            database: its schema is up to date.
            artifacts: where versions are written.
            settings: of this process.
            only: name of the one policy to train.
            until_version: `run` ends when every policy that it trains has come this far.
            make_learner: loads a policy.
        """
        self.name = new_id(f"{socket.gethostname()}-{os.getpid()}-")
        self._database = database
        self._artifacts = artifacts
        self._settings = settings
        self._only = only
        self._until = until_version
        self._make_learner = make_learner
        self._stop = threading.Event()
        self._learners: OrderedDict[_Key, Learner] = OrderedDict()
        self._backoffs: dict[_Key, _Backoff] = {}
        self._reporter = Reporter(artifacts)
        self._limits: dict[_Key, int] = {}
        """Longest sample that has room in memory, where one did not."""

    def stop(self) -> None:
        """End `run` soon: a step that has not been written yet is given up."""
        self._stop.set()

    def run(self, once: bool = False) -> bool:
        """Train until stopped, or make one pass over what is ready; False if a step failed."""
        log.info("%s: waiting for groups", self.name)
        try:
            return self._run(once)
        finally:
            self._reporter.close()

    def _run(self, once: bool) -> bool:
        while not self._stop.is_set():
            try:
                visits = self._pass()
            except SQLAlchemyError as error:
                if once:
                    raise
                log.warning("the database does not answer, trying again: %s", sentence(error))
                self._stop.wait(self._settings.backoff_seconds)
                continue
            if once:
                return Visit.FAILED not in visits
            if self._finished():
                return True
            if Visit.STEPPED not in visits:
                self._stop.wait(self._settings.poll_seconds)
        return True

    def _pass(self) -> list[Visit]:
        """Every policy once, in turn: none waits for more than one step of each other one."""
        return [self.visit(policy) for policy in self._policies() if not self._stop.is_set()]

    def _policies(self) -> list[TrainablePolicy]:
        found = claims.trainable_policies(self._database)
        return [policy for policy in found if self._only in (None, policy.name)]

    def _finished(self) -> bool:
        policies = self._policies()
        return (
            self._until is not None
            and bool(policies)
            and all(policy.head >= self._until for policy in policies)
        )

    def visit(self, policy: TrainablePolicy) -> Visit:
        """Claim what is ready for a policy and make the most of it."""
        backoff = self._backoffs.get(_key(policy))
        if backoff is not None and time.monotonic() < backoff.until:
            return Visit.NOTHING
        try:
            settings = PolicySettings.model_validate(policy.settings)
        except ValidationError as error:
            words = "; ".join(found["msg"] for found in error.errors())
            log.error("%s: its settings are wrong: %s", policy.name, words)
            self._back_off(policy)
            return Visit.FAILED
        if policy.held_by not in (None, self.name):
            # Another trainer takes a step.
            return Visit.NOTHING
        groups = claims.claim_groups(
            self._database,
            policy,
            self.name,
            limit=claim_limit(settings),
            at_least=settings.groups_per_step,
            group_size=settings.group_size,
            settle_seconds=settings.settle_seconds,
            deadline_seconds=settings.deadline_seconds,
            lease_seconds=self._settings.lease_seconds,
            exclusive=True,
        )
        if not groups:
            return Visit.NOTHING
        lease = self._settings.lease_seconds
        try:
            with LeaseKeeper(self._database, policy, groups, self.name, lease):
                return self._use(policy, settings, groups)
        except Exception as error:
            # Steps handle their own failures: this is the database, or the planning.
            log.exception("%s: %s", policy.name, explain(error)[1])
            self._back_off(policy)
            # Where the database is away, or its disk full, the leases run out.
            with contextlib.suppress(SQLAlchemyError):
                claims.release_groups(self._database, groups, self.name)
            return Visit.FAILED
        finally:
            with contextlib.suppress(SQLAlchemyError):
                policy_leases.release(self._database, policy, self.name)

    def _use(
        self, policy: TrainablePolicy, settings: PolicySettings, groups: list[ClaimedGroup]
    ) -> Visit:
        fitting = self._fitting(policy, settings)
        plan = make_plan(policy, groups, fitting, scale_rewards(settings))
        # A group that gets no more rewards does not wait for others to become ready.
        if not plan.enough and not plan.urgent:
            done = [g.claimed.final and g.reason is not None for g in plan.groups]
            hopeless = [g for g, over in zip(plan.groups, done, strict=True) if over]
            self._skip(policy, hopeless)
            rest = [g.claimed for g, over in zip(plan.groups, done, strict=True) if not over]
            claims.release_groups(self._database, rest, self.name)
            return Visit.SKIPPED if hopeless else Visit.NOTHING
        drop_aged(plan, lambda old: self._learner(policy).effective_shares(old))
        if not plan.teaching:
            self._skip(policy, plan.groups)
            return Visit.SKIPPED
        return self._step(policy, settings, plan)

    def _fitting(self, policy: TrainablePolicy, settings: PolicySettings) -> PolicySettings:
        """Settings under which nothing is planned that does not fit into memory."""
        limit = self._limits.get(_key(policy), settings.max_tokens)
        limit = min(limit, self._settings.token_budget or limit, settings.max_tokens)
        return settings.model_copy(update={"max_tokens": limit})

    def _skip(self, policy: TrainablePolicy, groups: Sequence[PlannedGroup]) -> None:
        for group in groups:
            training.skip_groups(
                self._database, [group.claimed], self.name, group.outcomes, group.uses
            )
            log.info("%s: group %s skipped, %s", policy.name, group.claimed.id, group.reason)

    def _step(self, policy: TrainablePolicy, settings: PolicySettings, plan: Plan) -> Visit:
        began = time.perf_counter()
        claimed = [group.claimed for group in plan.groups]
        config = {**replay.config_of(policy, self._settings), "samples": recipe_of(plan.samples)}
        step_id = training.begin_step(self._database, policy, self.name, config)
        folder: Path | None = None
        try:
            learner = self._learner(policy)
            loaded = time.perf_counter()
            stepped = learner.step(plan.samples, self._stop.is_set)
            plan.weigh(stepped.ratios)
            number = training.next_version(self._database, policy)
            path = checkpoints.version_folder(
                self._artifacts, policy.project, policy.name, number, step_id
            )
            learner.save(path, _record(policy, plan, step_id, number, learner))
            folder = path
            seconds = {"load": loaded - began, **stepped.seconds}
            seconds["total"] = time.perf_counter() - began
            seconds["save"] = seconds["total"] - sum(
                value for phase, value in seconds.items() if phase != "total"
            )
            metrics = {
                **plan.metrics(),
                **stepped.metrics,
                "seconds_by_phase": {name: round(value, 3) for name, value in seconds.items()},
            }
            training.finish_step(
                self._database,
                policy,
                step_id,
                self.name,
                number=number,
                adapter_path=folder,
                probe=stepped.probe,
                metrics=metrics,
                groups=claimed,
                outcomes=[outcome for group in plan.groups for outcome in group.outcomes],
                uses=[use for group in plan.groups for use in group.uses],
            )
        except Superseded as lost:
            self._forget(policy)
            if folder is not None:
                checkpoints.discard(folder)
            log.warning("%s: step %d given up: %s", policy.name, step_id, lost)
            return Visit.NOTHING
        except Exception as error:
            return self._failed(policy, settings, step_id, claimed, error)
        learner.version = number
        self._backoffs.pop(_key(policy), None)
        _report(policy, step_id, number, plan, stepped, seconds["total"])
        self._reporter.report(policy, settings, number, metrics)
        with contextlib.suppress(SQLAlchemyError):
            retention.tidy(self._database, self._artifacts, policy, settings.keep)
        return Visit.STEPPED

    def _failed(
        self,
        policy: TrainablePolicy,
        settings: PolicySettings,
        step_id: int,
        claimed: Sequence[ClaimedGroup],
        error: Exception,
    ) -> Visit:
        # The weights in memory are those of no version any more. A folder that was written stays:
        # whether the database knows of it cannot be told here; the next step's tidying can.
        self._forget(policy)
        reason, words = explain(error)
        training.fail_step(
            self._database,
            policy,
            step_id,
            self.name,
            claimed,
            words,
            reason=reason,
            pause_after=settings.pause_after if reason == NOT_FINITE else None,
        )
        if reason == STOPPED:
            log.info("%s: step %d given up: %s", policy.name, step_id, words)
            return Visit.NOTHING
        if isinstance(error, TooLong):
            # Planned anew at once, without what is too long.
            self._limits[_key(policy)] = error.limit
            log.warning("%s: step %d taken again: %s", policy.name, step_id, words)
            return Visit.FAILED
        self._back_off(policy)
        log.error(
            "%s: step %d failed: %s",
            policy.name,
            step_id,
            words,
            exc_info=log.isEnabledFor(logging.DEBUG),
        )
        return Visit.FAILED

    def _learner(self, policy: TrainablePolicy) -> Learner:
        key = _key(policy)
        learner = self._learners.get(key)
        if learner is not None and (
            learner.version != policy.head or learner.identity != identity(policy)
        ):
            # A rollback, another trainer, or other settings: the database is right.
            self._forget(policy)
            learner = None
        if learner is None:
            while len(self._learners) >= self._settings.resident_policies:
                self._learners.popitem(last=False)
            memory.release()
            learner = self._make_learner(policy, self._settings, self._artifacts)
            self._learners[key] = learner
        self._learners.move_to_end(key)
        return learner

    def _forget(self, policy: TrainablePolicy) -> None:
        if self._learners.pop(_key(policy), None) is not None:
            memory.release()

    def _back_off(self, policy: TrainablePolicy) -> None:
        previous = self._backoffs.get(_key(policy))
        failures = previous.failures + 1 if previous else 1
        pause = min(
            self._settings.backoff_seconds * 2 ** (failures - 1),
            self._settings.backoff_limit_seconds,
        )
        self._backoffs[_key(policy)] = _Backoff(failures, time.monotonic() + pause)


def _key(policy: TrainablePolicy) -> _Key:
    return policy.project, policy.name


def _record(
    policy: TrainablePolicy, plan: Plan, step_id: int, number: int, learner: Learner
) -> checkpoints.StepRecord:
    uses = [use for group in plan.teaching for use in group.uses if use.reason is None]
    return checkpoints.StepRecord(
        version=number,
        parent=policy.head,
        step_id=step_id,
        optimizer_steps=learner.optimizer_steps,
        groups=[group.claimed.id for group in plan.teaching],
        trajectories=sorted({use.trajectory_id for use in uses}),
        completions=sorted({use.completion_id for use in uses}),
    )


def _report(
    policy: TrainablePolicy,
    step_id: int,
    number: int,
    plan: Plan,
    stepped: Stepped,
    seconds: float,
) -> None:
    data, made = plan.metrics(), stepped.metrics
    log.info(
        "%s@%d step=%d groups=%d equal=%d samples=%d tokens=%d trained=%d reward=%.4f loss=%.5f "
        "grad_norm=%.4f kl_sampling=%.5f seconds=%.1f",
        policy.name,
        number,
        step_id,
        data["groups"],
        data["groups_equal"],
        data["samples"],
        made["tokens_seen"],
        made["tokens_trained"],
        data["reward_mean"],
        made["loss"],
        made["grad_norm"],
        made["kl_sampling"],
        seconds,
    )
