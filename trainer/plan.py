"""Claimed groups → what a step trains on, and what becomes of every trajectory and answer.

Who is compared with whom. Members that wait for the first time are compared with each other. One
whose reward came or changed after it was decided about is compared with the members that were
decided about before, and trained on once more, with what its advantage has changed by: the new one
less what the policy's weights have been taught already. The others keep theirs: what they were
compared with did not know the new reward, but a baseline may be anything that does not depend on
the episode itself. Only where all of them had been equal, or too few, is there now something to
learn from all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from gateway.store.claims import ClaimedGroup, TrainablePolicy
from gateway.store.policy_settings import PolicySettings
from gateway.store.training import Outcome, Use
from trainer import metrics, scores
from trainer.credit import (
    EQUAL,
    SEEN_BEFORE,
    Credit,
    Returns,
    advantages,
    against_running,
    equal_scores,
    nothing_beside,
)
from trainer.episodes import Episode, episodes
from trainer.samples import ChoiceKey, CutTrajectory, Sample, cut, samples_of

NO_REWARD = "no_reward"
EQUAL_REWARDS = "equal_rewards"
TOO_FEW = "too_few"

_Credits = Mapping[ChoiceKey | None, Credit]


@dataclass(frozen=True, slots=True)
class Member:
    """An episode of a group: cut, and scored."""

    episode: Episode
    cut: CutTrajectory
    scores: scores.TrajectoryScores
    compared: dict[ChoiceKey | None, Returns]
    """What it brings into the comparison; empty if nothing of it can be trained on."""
    learn: bool = True
    """Whether it is trained on; else the others are only compared with it."""

    @property
    def score(self) -> float | None:
        """Mean of what it brings."""
        firsts = [value[0] for value in self.compared.values() if value[0] is not None]
        return sum(firsts) / len(firsts) if firsts else None


@dataclass(slots=True)
class PlannedGroup:
    """A claimed group and what it is worth.

    Trajectories without an outcome go on waiting: the group can still get rewards.
    """

    claimed: ClaimedGroup
    compared: list[list[Member]] = field(default_factory=list)
    """Members that are compared with each other."""
    samples: list[Sample] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    single: bool = False
    """Seen once, and compared with the running baseline."""
    reason: str | None = None
    """Why it teaches nothing; None if it does."""

    @property
    def members(self) -> list[Member]:
        """All that is trained on, or would be if it taught anything."""
        return [member for arena in self.compared for member in arena if member.learn]

    @property
    def scores(self) -> list[float]:
        """All scores that are compared with each other."""
        return _scores(self.members)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with the groups that were claimed together."""

    groups: list[PlannedGroup]
    head: int
    settings: PolicySettings

    @property
    def teaching(self) -> list[PlannedGroup]:
        """The groups that there is something to learn from."""
        return [group for group in self.groups if group.reason is None]

    @property
    def samples(self) -> list[Sample]:
        """All samples of the step, group by group."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def enough(self) -> bool:
        """Whether these are the groups of a whole step; singles count as shares of one."""
        share = 1 / self.settings.group_size
        counted = sum(share if group.single else 1 for group in self.groups)
        return counted >= self.settings.groups_per_step - 1e-9

    @property
    def urgent(self) -> bool:
        """Whether a group among these gets no more rewards, so that waiting brings nothing."""
        return any(group.claimed.final and not group.single for group in self.teaching)

    def weigh(self, ratios: Mapping[ChoiceKey, float]) -> None:
        """Note the importance weights that the step found."""
        for group in self.groups:
            for use in group.uses:
                use.ratio = ratios.get(ChoiceKey(use.completion_id, use.choice))

    def metrics(self) -> dict[str, object]:
        """Numbers about the data of the step."""
        return metrics.of_data(self)


def make_plan(
    policy: TrainablePolicy, groups: Sequence[ClaimedGroup], settings: PolicySettings, scale: str
) -> Plan:
    """Decide about every trajectory of the claimed groups.

    Args:
        policy: the policy at its head.
        groups: claimed for it.
        settings: the policy's.
        scale: `scale_rewards`, see `trainer.credit`.
    """
    planned = [_Grouping(policy, group, settings, scale) for group in groups]
    arenas = [arena for grouping in planned for arena in grouping.teaching]
    together = [arena for arena in arenas if arena.single is None]
    if together:
        leave_one_out = settings.baseline == "leave_one_out"
        parts = [part for arena in together for part in arena.parts if len(part) > 1]
        found = iter(advantages(parts, scale, leave_one_out))
        for arena in together:
            arena.credits = [
                credit
                for part in arena.parts
                for credit in (next(found) if len(part) > 1 else map(nothing_beside, part))
            ]
    for grouping in planned:
        grouping.teach()
    return Plan([grouping.group for grouping in planned], policy.head, settings)


@dataclass(slots=True)
class _Arena:
    """Members that are compared with each other, and what came of it."""

    members: list[Member]
    by_choice: bool
    """Choices are compared with the others of their completion alone."""
    single: Callable[[Returns], Credit] | None = None
    """What compares the only member with the running baseline."""
    credits: list[Credit] = field(default_factory=list)

    @property
    def returns(self) -> list[Returns]:
        return [value for member in self.members for value in member.compared.values()]

    @property
    def parts(self) -> list[list[Returns]]:
        """The same, in the parts within which it is compared."""
        if not self.by_choice:
            return [self.returns]
        keyed = [one for member in self.members for one in member.compared.items()]
        groups = groupby(keyed, lambda one: one[0] and one[0].completion_id)
        return [[value for _, value in group] for _, group in groups]


class _Grouping:
    """One claimed group on its way to be planned."""

    def __init__(
        self, policy: TrainablePolicy, claimed: ClaimedGroup, settings: PolicySettings, scale: str
    ):
        self._policy = policy
        self._settings = settings
        self._scale = scale
        self.claimed = claimed
        self.group = PlannedGroup(claimed)
        self.teaching: list[_Arena] = []
        waiting = [self._member(e) for e in episodes(claimed.trajectories, claimed.relatives)]
        fresh = self._scored([m for m in waiting if not m.episode.revised])
        revised = self._scored([m for m in waiting if m.episode.revised])
        peers = self._peers()
        if fresh and len(_scores(fresh)) < 2 and claimed.final and (revised or peers):
            revised, fresh = [*fresh, *revised], []
        reasons = []
        if fresh:
            reasons.append(self._compare(fresh, claimed.final))
        if revised:
            reasons.append(self._compare([*revised, *peers], final=True))
        if None not in reasons:
            self.group.reason = reasons[0] if reasons else TOO_FEW

    def _member(self, episode: Episode, learn: bool = True) -> Member:
        settings = self._settings
        pieces = cut(episode.trajectory, self._policy.name, self._policy.head, settings)
        scored = scores.score(episode.scored_by, settings.reward_weights)
        found = scores.compared(pieces, scored, settings.turn_discount)
        return Member(episode, pieces, scored, found, learn)

    def _scored(self, members: Sequence[Member]) -> list[Member]:
        """Those that can be compared; of the others is said why, as far as it is certain."""
        found = []
        for member in members:
            if not member.scores:
                if self.claimed.final or member.episode.revised:
                    self._leave_out(member, NO_REWARD)
            elif not member.compared:
                self._leave_out(member, member.cut.reason or NO_REWARD)
            else:
                found.append(member)
        return found

    def _peers(self) -> list[Member]:
        """Earlier members of the group that the present ones can be compared with."""
        found = []
        for episode in episodes(self.claimed.relatives.peers, self.claimed.relatives):
            # They taught nothing for the want of something to compare them with.
            again = episode.trajectory.state == "skipped"
            member = self._member(episode, again)
            if not member.compared and member.scores.whole is not None:
                # Too old to be trained on is not too old to be compared with.
                member = replace(member, compared={None: (member.scores.whole,)}, learn=False)
            if member.compared:
                found.append(member)
        return found

    def _compare(self, members: list[Member], final: bool) -> str | None:
        """Put members beside each other; returns why there is nothing to learn from that."""
        self.group.compared.append(members)
        arena = _Arena(members, self.claimed.by_choice)
        running = self.claimed.relatives.running
        if len(arena.returns) < 2:
            if not final:
                return TOO_FEW
            if not self._settings.singles or running.count < SEEN_BEFORE:
                return self._leave_all_out(members, TOO_FEW)
            task = self.claimed.relatives.running_task
            arena.single = lambda value: against_running(value, running, task, self._scale)
            arena.credits = [arena.single(arena.returns[0])]
            self.group.single = True
        elif all(len(part) < 2 for part in arena.parts):
            return self._leave_all_out(members, TOO_FEW) if final else TOO_FEW
        elif all(map(equal_scores, arena.parts)) and not any(map(self._taught, members)):
            return self._leave_all_out(members, EQUAL_REWARDS)
        self.teaching.append(arena)
        return None

    def _taught(self, member: Member) -> bool:
        taught = member.episode.taught
        keys = ((turn.key.completion_id, turn.key.choice) for turn in member.cut.turns)
        return member.learn and any(abs(taught.get(key, 0.0)) > EQUAL for key in keys)

    def _leave_all_out(self, members: Sequence[Member], reason: str) -> str:
        for member in members:
            # Of one that was left out before, nothing has changed.
            if member.learn and member.episode.trajectory.state == "open":
                self._leave_out(member, reason)
        return reason

    def teach(self) -> None:
        """Turn credits into samples, once those of all groups are known."""
        taught = False
        for arena in self.teaching:
            credits = iter(arena.credits)
            for member in arena.members:
                own = {key: next(credits) for key in member.compared}
                if member.learn:
                    taught |= self._teach(member, own)
        if self.teaching and not taught:
            self.group.reason = EQUAL_REWARDS

    def _teach(self, member: Member, credits: _Credits) -> bool:
        by_turn = _spread(member, {key: c.advantages for key, c in credits.items()})
        for key in by_turn:
            by_turn[key] -= member.episode.taught.get((key.completion_id, key.choice), 0.0)
        # Beside others of its group an advantage of 0 says something; here it is no news.
        alone = member.episode.revised or self.group.single
        if alone and all(abs(value) <= EQUAL for value in by_turn.values()):
            self._leave_out(member, EQUAL_REWARDS)
            return False
        baselines = _spread(member, {key: c.baselines for key, c in credits.items()})
        worth = _spread(member, member.compared)
        self.group.samples.extend(samples_of(member.episode.trajectory, member.cut.turns, by_turn))
        for turn in member.cut.turns:
            if turn.key in by_turn:
                self._use(
                    member,
                    turn.key,
                    None,
                    reward=worth[turn.key],
                    advantage=by_turn[turn.key],
                    baseline=baselines[turn.key],
                    tokens=turn.tokens,
                )
            else:
                self._use(member, turn.key, NO_REWARD)
        self._left_out_turns(member)
        self._outcomes(member, None)
        return True

    def _leave_out(self, member: Member, reason: str) -> None:
        worth = _spread(member, member.compared)
        for turn in member.cut.turns:
            reward = worth.get(turn.key, member.scores.whole)
            self._use(member, turn.key, reason, reward=reward)
        self._left_out_turns(member)
        self._outcomes(member, reason)

    def _left_out_turns(self, member: Member) -> None:
        for left in member.cut.left_out:
            self._use(member, left.key, left.reason, reward=member.scores.whole)

    def _use(
        self,
        member: Member,
        key: ChoiceKey,
        reason: str | None,
        *,
        reward: float | None = None,
        advantage: float | None = None,
        baseline: float | None = None,
        tokens: int = 0,
    ) -> None:
        owner = member.episode.owner[key.completion_id]
        self.group.uses.append(
            Use(
                completion_id=key.completion_id,
                choice=key.choice,
                trajectory_id=owner.id,
                group_id=self.claimed.id,
                reward=reward,
                advantage=advantage,
                tokens=tokens,
                reason=reason,
                revision=owner.revision,
                baseline=baseline,
            )
        )

    def _outcomes(self, member: Member, reason: str | None) -> None:
        trained = {turn.key.completion_id for turn in member.cut.turns}
        why = {left.key.completion_id: left.reason for left in member.cut.left_out}
        for index, part in enumerate(member.episode.parts):
            own = [completion.id for completion in part.completions]
            lost = [why[id] for id in own if id in why]
            if reason is None and index and lost and not trained.intersection(own):
                self.group.outcomes.append(Outcome(part.id, lost[-1], part.revision))
                continue
            first = index == 0 and part.settled_revision is None
            self.group.outcomes.append(
                Outcome(
                    part.id,
                    reason,
                    part.revision,
                    score=member.score if first else None,
                    task=self.claimed.task if self._settings.singles else None,
                )
            )


def _spread(member: Member, values: Mapping[ChoiceKey | None, Returns]) -> dict[ChoiceKey, float]:
    return scores.per_turn(member.cut, member.scores, values)


def _scores(members: Sequence[Member]) -> list[float]:
    return [
        value[0] for member in members for value in member.compared.values() if value[0] is not None
    ]


def claim_limit(settings: PolicySettings) -> int:
    """Most groups that are claimed for a step; singles are shares of one."""
    return settings.groups_per_step * (settings.group_size if settings.singles else 1)
