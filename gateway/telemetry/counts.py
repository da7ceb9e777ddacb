"""The counts of the database as Prometheus's families."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.store.census import Census

_VERSIONS = 20
"""Newest versions of a policy whose rewards are shown: every version would be a series for good."""

_OWNER = ("project", "policy")


def collect(census: Census) -> Iterator[Metric]:
    """Everything in it; rewards of the newest versions only."""
    yield _gauge("groups", "Groups", ("state", "reason"), census.groups)
    yield _gauge("trajectories", "Trajectories", ("split", "state", "reason"), census.trajectories)
    yield _gauge(
        "oldest_ready_group_timestamp_seconds",
        "Since when the longest waiting ready group has waited",
        (),
        census.oldest_ready,
    )
    steps = CounterMetricFamily("strop_steps", "Optimiser steps", labels=(*_OWNER, "state"))
    for key, count in census.steps.items():
        steps.add_metric(key, count)
    yield steps
    yield _gauge(
        "last_step_timestamp_seconds", "When the newest step was done", (), census.last_step
    )
    yield _gauge("versions", "Versions", ("state",), census.versions)
    events = CounterMetricFamily("strop_events", "Events", labels=(*_OWNER, "kind"))
    for key, count in census.events.items():
        events.add_metric(key, count)
    yield events
    yield _gauge(
        "last_event_timestamp_seconds", "When the newest was", ("kind",), census.last_event
    )
    yield from _rewards(census)
    yield from _langfuse(census)


def _gauge(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> Metric:
    family = GaugeMetricFamily(f"strop_{name}", text, labels=(*_OWNER, *labels))
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _rewards(census: Census) -> Iterator[Metric]:
    labels = (*_OWNER, "version", "split")
    mean = GaugeMetricFamily("strop_reward_mean", "Mean reward of a version", labels=labels)
    error = GaugeMetricFamily(
        "strop_reward_standard_error", "Standard error of that mean", labels=labels
    )
    number = GaugeMetricFamily(
        "strop_reward_trajectories", "Trajectories with a reward behind it", labels=labels
    )
    for owner, rewards in census.rewards.items():
        newest = sorted({reward.version for reward in rewards})[-_VERSIONS:]
        for reward in rewards:
            if reward.version not in newest:
                continue
            key = (*owner, str(reward.version), reward.split)
            mean.add_metric(key, reward.mean)
            number.add_metric(key, reward.trajectories)
            if reward.standard_error is not None:
                error.add_metric(key, reward.standard_error)
    yield from (mean, error, number)


def _langfuse(census: Census) -> Iterator[Metric]:
    if not census.langfuse:
        return
    waiting = GaugeMetricFamily("strop_langfuse_waiting", "Not sent yet", labels=("project",))
    refused = GaugeMetricFamily(
        "strop_langfuse_refused", "Set aside: Langfuse does not take it", labels=("project",)
    )
    oldest = GaugeMetricFamily(
        "strop_langfuse_lag_seconds", "Age of the oldest that waits", labels=("project",)
    )
    for lag in census.langfuse:
        waiting.add_metric((lag.project,), lag.waiting)
        refused.add_metric((lag.project,), lag.refused)
        oldest.add_metric((lag.project,), lag.oldest_seconds)
    yield from (waiting, refused, oldest)
