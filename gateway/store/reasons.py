"""The reasons for which something is not trained on, in words."""

REASONS = {
    "no_reward": "nothing was posted for it in time; a reward that is posted now brings it back",
    "equal_rewards": (
        "all that it was compared with was worth the same, so there was nothing to learn from the "
        "difference; a reward that comes or changes later brings it back"
    ),
    "too_few": (
        "nothing was there to compare it with when its group's time was up; a reward of another "
        "member of the group brings it back, and with singles = true in the policy's settings it "
        "is compared with the policy's running baseline"
    ),
    "stale": (
        "too many versions lie between the one that sampled it and the one being trained "
        "(max_staleness), or its importance weights leave too little of it "
        "(min_effective_sample)"
    ),
    "too_long": "it is longer than the policy's max_tokens, or than memory has room for",
    "no_token_ids": "ids, logprobs and usage that vLLM sent do not agree in number",
    "biased_sampling": (
        "top-p, top-k, min-p, penalties, a forced tool or format, or temperature 0 made it "
        "something else than a sample of the model's own distribution; train_biased = true trains "
        "on it all the same"
    ),
    "aborted": "the client or vLLM went away before it was whole",
    "multimodal": "images and sound are not trained on yet",
    "side_call": "it is marked as beside the agent's own work (train: false, or side_calls)",
    "wrong_version": "vLLM answered with another model than it was asked for",
}


def words(reason: str) -> str:
    """What a reason means, and what can be done about it."""
    return REASONS.get(reason, reason)


def span(seconds: float) -> str:
    """A length of time as people say it."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"
