"""Whether a replica really answers with a version: its logprobs of the version's probe."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Json = dict[str, Any]


class ProbeFailed(Exception):
    """A replica does not answer with the version that it should; carries the numbers."""

    def __init__(self, message: str, numbers: Json | None = None):
        super().__init__(message)
        self.numbers = {"error": message, **(numbers or {})}


def compare(served: Sequence[float], probe: Json, tolerance: float) -> Json:
    """Whether a replica's logprobs of a probe are those of the version, not of the one before.

    Args:
        served: logprobs from the replica, in nats.
        probe: `logprobs` and, where there is a version before, `previous_logprobs`, from the
            trainer's own model, of the same tokens.
        tolerance: largest mean absolute difference to `logprobs`.

    Raises:
        ProbeFailed: not finite, too far away, or no nearer than the version before.
    """
    answer = np.asarray(served, dtype=np.float64)
    wanted = np.asarray(probe["logprobs"], dtype=np.float64)
    if answer.shape != wanted.shape or not np.isfinite(answer).all():
        raise ProbeFailed("the replica's logprobs are not finite or not as many as the probe's")
    difference = np.abs(answer - wanted)
    numbers: Json = {
        "tokens": len(answer),
        "mean_difference": float(difference.mean()),
        "max_difference": float(difference.max()),
    }
    if difference.mean() > tolerance:
        raise ProbeFailed(
            f"its logprobs differ from the trainer's by {difference.mean():.2g} nats on average, "
            f"more than the tolerance of {tolerance:g}",
            numbers,
        )
    previous = probe.get("previous_logprobs")
    if previous is not None:
        before = float(np.abs(answer - np.asarray(previous, dtype=np.float64)).mean())
        numbers["mean_difference_to_previous"] = before
        # Nearer to itself than half of the way to the version before: unmistakably this one.
        if before <= 2 * difference.mean() or before == 0:
            raise ProbeFailed(
                f"its logprobs are {before:.2g} nats from the version before and "
                f"{difference.mean():.2g} from this one: the two cannot be told apart",
                numbers,
            )
    return numbers
