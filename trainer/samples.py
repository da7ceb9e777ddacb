"""Logged completions → the token sequences that the loss is taken over, and what is left out, why.

A turn whose prompt repeats, token for token, the whole sequence of an earlier turn (its prompt and
its answer) continues that turn; a chain of such turns is one sequence, however many there are.
Where the client rewrote its history, or several turns continue the same one, the sequence forks:
every end is a sample of its own, and a turn that several samples share is trained on in the first
of them only, so every sampled token is trained on exactly once. Nothing is ever re-tokenised.

A turn that cannot be trained on takes no part in this. Its tokens are still in the prompts of the
turns after it, where they are context like everything else that was not sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gateway.store.policy_settings import PolicySettings
from gateway.store.records import StoredChoice, StoredCompletion, StoredTrajectory

NO_TOKEN_IDS = "no_token_ids"
WRONG_VERSION = "wrong_version"
STALE = "stale"
TOO_LONG = "too_long"
BIASED_SAMPLING = "biased_sampling"
ABORTED = "aborted"

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChoiceKey:
    """One answer: a completion and which of its choices."""

    completion_id: str
    choice: int


@dataclass(slots=True, eq=False)
class Turn:
    """One answer that can be trained on, and the turns that its prompt repeats."""

    key: ChoiceKey
    token_ids: Ids
    """Prompt and answer, (L,)."""
    start: int
    """Where the answer begins; all tokens from there on were sampled."""
    logprobs: list[float]
    """Of the answer's tokens under the distribution they were sampled from, in nats."""
    version: int
    temperature: float
    parent: "Turn | None" = None
    children: list["Turn"] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many tokens were sampled."""
        return len(self.token_ids) - self.start

    def line(self) -> list["Turn"]:
        """This turn and those before it, the first one first."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An answer that is not trained on."""

    key: ChoiceKey
    reason: str


@dataclass(frozen=True, slots=True)
class CutTrajectory:
    """A trajectory cut into turns."""

    turns: list[Turn]
    """In the order in which they were asked for."""
    left_out: list[LeftOut]
    completions: list[str]
    """All completions of the policy, in the order in which they were asked for; turn k of the
    episode is the k-th of them."""

    @property
    def reason(self) -> str | None:
        """Why nothing of it can be trained on; None if something can."""
        if self.turns:
            return None
        # Of several reasons, the one of the last answer: it is the one that carries the reward.
        return self.left_out[-1].reason if self.left_out else NO_TOKEN_IDS


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled tokens of a sample: positions `start` to `stop` of its token ids."""

    key: ChoiceKey
    start: int
    stop: int
    logprobs: list[float]
    """(stop - start,), as `Turn.logprobs`."""
    version: int
    temperature: float
    advantage: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of tokens that the loss is taken over, in its spans."""

    trajectory_id: str
    group_id: str
    token_ids: Ids
    """(L,)"""
    spans: list[Span]

    @property
    def trained(self) -> int:
        """How many of its tokens are trained on."""
        return sum(span.stop - span.start for span in self.spans)


def cut(
    trajectory: StoredTrajectory, policy: str, head: int, settings: PolicySettings
) -> CutTrajectory:
    """Cut a trajectory into turns.

    Args:
        trajectory: completions in the order in which they were asked for.
        policy: completions of other models are no part of the result.
        head: the version being trained, which staleness is counted from. A rollback makes the
            version that sampled the newer of the two; the distance counts in both directions.
        settings: `max_staleness`, `max_tokens` and `train_biased` are used.
    """
    turns: list[Turn] = []
    left_out: list[LeftOut] = []
    completions: list[str] = []
    for completion in trajectory.completions:
        if completion.policy != policy:
            continue
        completions.append(completion.id)
        for choice in completion.choices or [StoredChoice(0, None, None, None)]:
            key = ChoiceKey(completion.id, choice.index)
            reason = _reason(completion, choice, head, settings)
            if reason is not None:
                left_out.append(LeftOut(key, reason))
                continue
            turns.append(_turn(key, completion, choice))
    for index, turn in enumerate(turns):
        turn.parent = _parent(turn, turns[:index])
        if turn.parent is not None:
            turn.parent.children.append(turn)
    return CutTrajectory(turns, left_out, completions)


def _reason(
    completion: StoredCompletion, choice: StoredChoice, head: int, settings: PolicySettings
) -> str | None:
    allowed = settings.train_biased and completion.reason == BIASED_SAMPLING
    if completion.reason is not None and not allowed:
        return completion.reason
    if completion.status != "complete":
        return ABORTED
    prompt, answer, logprobs = completion.prompt_ids, choice.token_ids, choice.logprobs
    if not prompt or not answer or logprobs is None or len(logprobs) != len(answer):
        return NO_TOKEN_IDS
    if not np.isfinite(logprobs).all():
        return NO_TOKEN_IDS
    if completion.version is None:
        return WRONG_VERSION
    if abs(head - completion.version) > settings.max_staleness:
        return STALE
    if len(prompt) + len(answer) > settings.max_tokens:
        return TOO_LONG
    if _temperature(completion) <= 0 and not settings.train_biased:
        # Greedy decoding draws from no distribution at all.
        return BIASED_SAMPLING
    return None


def _temperature(completion: StoredCompletion) -> float:
    temperature = completion.sampling.get("temperature")
    return 1.0 if temperature is None else float(temperature)


def _turn(key: ChoiceKey, completion: StoredCompletion, choice: StoredChoice) -> Turn:
    prompt, answer = completion.prompt_ids or [], choice.token_ids or []
    temperature = _temperature(completion)
    return Turn(
        key=key,
        token_ids=np.array([*prompt, *answer], dtype=np.int64),
        start=len(prompt),
        logprobs=list(choice.logprobs or ()),
        version=completion.version or 0,
        # vLLM reports greedy answers with the logprobs of temperature 1.
        temperature=temperature if temperature > 0 else 1.0,
    )


def _parent(turn: Turn, earlier: Sequence[Turn]) -> Turn | None:
    """The longest earlier turn whose whole sequence the prompt of `turn` begins with."""
    prompt = turn.token_ids[: turn.start]
    best: Turn | None = None
    for other in earlier:
        length = len(other.token_ids)
        if length > len(prompt) or (best is not None and length <= len(best.token_ids)):
            continue
        # Siblings differ at their ends, so looking there first is what makes this cheap.
        if prompt[length - 1] == other.token_ids[-1] and np.array_equal(
            prompt[:length], other.token_ids
        ):
            best = other
    return best


def samples_of(
    trajectory: StoredTrajectory,
    turns: Sequence[Turn],
    advantages: dict[ChoiceKey, float],
) -> list[Sample]:
    """One sample for every end of the turns' tree; turns without an advantage are context."""
    taken: set[ChoiceKey] = set()
    samples = []
    for end in turns:
        if end.children:
            continue
        spans = []
        for turn in end.line():
            if turn.key in advantages and turn.key not in taken:
                taken.add(turn.key)
                spans.append(
                    Span(
                        key=turn.key,
                        start=turn.start,
                        stop=len(turn.token_ids),
                        logprobs=turn.logprobs,
                        version=turn.version,
                        temperature=turn.temperature,
                        advantage=advantages[turn.key],
                    )
                )
        if spans:
            # Nothing after the last trained token has any part in the loss.
            ids = end.token_ids[: spans[-1].stop]
            samples.append(Sample(trajectory.id, trajectory.group_id, ids, spans))
    return samples
