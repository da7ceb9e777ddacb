"""Claimed groups → what a step trains on, and what becomes of every trajectory and answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from gateway.store.claims import ClaimedGroup, TrainablePolicy
from gateway.store.policy_settings import PolicySettings
from gateway.store.records import StoredTrajectory
from gateway.store.training import Outcome, Use
from trainer import scores
from trainer.grpo import advantages, equal_scores
from trainer.samples import ChoiceKey, CutTrajectory, Sample, cut, samples_of

NO_REWARD = "no_reward"
EQUAL_REWARDS = "equal_rewards"
TOO_FEW = "too_few"


@dataclass(frozen=True, slots=True)
class Member:
    """A trajectory of a group: cut, and scored."""

    trajectory: StoredTrajectory
    cut: CutTrajectory
    scores: scores.TrajectoryScores
    compared: dict[ChoiceKey | None, float]
    """What it brings into the comparison; empty if nothing of it can be trained on."""


@dataclass(slots=True)
class PlannedGroup:
    """A claimed group and what it is worth.

    Trajectories without an outcome go on waiting: the group can still get rewards.
    """

    claimed: ClaimedGroup
    compared: list[Member] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    reason: str | None = None
    """Why it teaches nothing; None if it does."""

    @property
    def scores(self) -> list[float]:
        """All that is compared with each other."""
        return [score for member in self.compared for score in member.compared.values()]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with the groups that were claimed together."""

    groups: list[PlannedGroup]
    head: int

    @property
    def teaching(self) -> list[PlannedGroup]:
        """The groups that there is something to learn from."""
        return [group for group in self.groups if group.reason is None]

    @property
    def samples(self) -> list[Sample]:
        """All samples of the step, group by group."""
        return [sample for group in self.groups for sample in group.samples]

    def metrics(self) -> dict[str, float]:
        """Numbers about the data of the step."""
        rewards = [score for group in self.groups for score in group.scores]
        spans = [span for sample in self.samples for span in sample.spans]
        return {
            "groups": len(self.teaching),
            "groups_equal": sum(group.reason == EQUAL_REWARDS for group in self.groups),
            "samples": len(self.samples),
            "reward_mean": fmean(rewards),
            "reward_std": pstdev(rewards),
            "advantage_std": pstdev([span.advantage for span in spans]),
            "staleness_mean": fmean([abs(self.head - span.version) for span in spans]),
        }


def make_plan(
    policy: TrainablePolicy, groups: Sequence[ClaimedGroup], settings: PolicySettings, scale: str
) -> Plan:
    """Decide about every trajectory of the claimed groups.

    Args:
        policy: the policy at its head.
        groups: claimed for it.
        settings: the policy's.
        scale: `scale_rewards`, see `trainer.grpo.advantages`.
    """
    planned = [_compare(policy, group, settings) for group in groups]
    teaching = [group for group in planned if group.reason is None]
    if teaching:
        values = advantages([group.scores for group in teaching], scale)
        for group, advantage in zip(teaching, values, strict=True):
            _teach(group, advantage)
    return Plan(planned, policy.head)


def _compare(
    policy: TrainablePolicy, claimed: ClaimedGroup, settings: PolicySettings
) -> PlannedGroup:
    group = PlannedGroup(claimed)
    for trajectory in claimed.trajectories:
        pieces = cut(trajectory, policy.name, policy.head, settings)
        scored = scores.score(trajectory, settings.reward_weights)
        member = Member(trajectory, pieces, scored, scores.compared(pieces, scored))
        if not scored:
            if claimed.final:
                _leave_out(group, member, NO_REWARD)
        elif not member.compared:
            _leave_out(group, member, pieces.reason or NO_REWARD)
        else:
            group.compared.append(member)
    found = group.scores
    if len(found) < 2:
        group.reason = TOO_FEW
        if claimed.final:
            _leave_out_compared(group, TOO_FEW)
    elif equal_scores(found):
        group.reason = EQUAL_REWARDS
        _leave_out_compared(group, EQUAL_REWARDS)
    return group


def _leave_out_compared(group: PlannedGroup, reason: str) -> None:
    for member in group.compared:
        _leave_out(group, member, reason)


def _leave_out(group: PlannedGroup, member: Member, reason: str) -> None:
    trajectory = member.trajectory
    group.outcomes.append(Outcome(trajectory.id, reason))
    for left in member.cut.left_out:
        group.uses.append(_use(trajectory, left.key, member.scores.whole, None, 0, left.reason))
    rewards = scores.per_turn(member.cut, member.scores, member.compared)
    for turn in member.cut.turns:
        reward = rewards.get(turn.key, member.scores.whole)
        group.uses.append(_use(trajectory, turn.key, reward, None, 0, reason))


def _teach(group: PlannedGroup, advantage: Sequence[float]) -> None:
    values = iter(advantage)
    for member in group.compared:
        trajectory = member.trajectory
        own = {key: next(values) for key in member.compared}
        by_turn = scores.per_turn(member.cut, member.scores, own)
        rewards = scores.per_turn(member.cut, member.scores, member.compared)
        group.samples.extend(samples_of(trajectory, member.cut.turns, by_turn))
        group.outcomes.append(Outcome(trajectory.id, None))
        for left in member.cut.left_out:
            group.uses.append(_use(trajectory, left.key, member.scores.whole, None, 0, left.reason))
        for turn in member.cut.turns:
            if turn.key in by_turn:
                worth, reason, tokens = by_turn[turn.key], None, turn.tokens
                reward = rewards[turn.key]
                use = _use(trajectory, turn.key, reward, worth, tokens, reason)
            else:
                use = _use(trajectory, turn.key, None, None, 0, NO_REWARD)
            group.uses.append(use)


def _use(
    trajectory: StoredTrajectory,
    key: ChoiceKey,
    reward: float | None,
    advantage: float | None,
    tokens: int,
    reason: str | None,
) -> Use:
    return Use(
        completion_id=key.completion_id,
        choice=key.choice,
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        reward=reward,
        advantage=advantage,
        tokens=tokens,
        reason=reason,
    )
