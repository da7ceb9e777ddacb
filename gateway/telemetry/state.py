"""What there is at the moment of a scrape: the queue, the journal, the replicas, the policies."""

import re
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from gateway.gateway import Gateway
from gateway.store.models import DEFAULT_PROJECT

_SERVED = re.compile(r"(?:(?P<project>[^/]+)/)?(?P<policy>[^/]+)@(?P<version>\d+)")

_ADDED_UP = ("entries", "pending", "rejected")
"""Of the journal's state."""


def collect(gateway: Gateway) -> Iterator[Metric]:
    """Gauges of this process; nothing here waits for the database."""
    yield from _writer(gateway)
    yield from _journal(gateway)
    yield from _replicas(gateway)
    yield from _webhooks(gateway)


def _writer(gateway: Gateway) -> Iterator[Metric]:
    writer = gateway.writer
    yield GaugeMetricFamily(
        "strop_commit_queue", "Writes that wait for a commit", value=writer.pending
    )
    yield GaugeMetricFamily(
        "strop_commit_queue_limit",
        "Writes that may wait before requests are refused with 429",
        value=gateway.settings.commit_queue,
    )
    commits = HistogramMetricFamily("strop_commit_seconds", "Time of one group commit")
    commits.add_metric((), writer.commit_seconds.buckets(), writer.commit_seconds.sum)
    yield commits
    writes = CounterMetricFamily("strop_writes", "Writes that shared those commits")
    writes.add_metric((), writer.writes)
    yield writes


def _journal(gateway: Gateway) -> Iterator[Metric]:
    if gateway.writer.journal is None:
        return
    state = gateway.writer.journal.state()
    if not gateway.writer.counts_all:
        # They are added up over the processes; the age of the oldest is not.
        state = {"oldest_seconds": state["oldest_seconds"], **dict.fromkeys(_ADDED_UP, 0)}
    for name, key, text in (
        ("entries", "entries", "Entries that wait for PostgreSQL"),
        ("oldest_seconds", "oldest_seconds", "Age of the oldest entry"),
        ("pending_rewards", "pending", "Rewards whose completion is not there yet"),
        ("rejected", "rejected", "Entries that PostgreSQL did not take"),
    ):
        yield GaugeMetricFamily(f"strop_journal_{name}", text, value=state[key] or 0)


def _replicas(gateway: Gateway) -> Iterator[Metric]:
    healthy = GaugeMetricFamily("strop_replica_up", "1: vLLM answers", labels=("replica",))
    in_flight = GaugeMetricFamily(
        "strop_replica_in_flight", "Requests that a replica works on", labels=("replica",)
    )
    serves = GaugeMetricFamily(
        "strop_replica_serves",
        "1: this version passed its probe on this replica",
        labels=("replica", "project", "policy", "version"),
    )
    missing = GaugeMetricFamily(
        "strop_replica_missing_alias",
        "1: the replica does not serve the version that the policy's alias points to",
        labels=("replica", "project", "policy"),
    )
    alias = GaugeMetricFamily(
        "strop_policy_alias", "The version that the policy serves", labels=("project", "policy")
    )
    policies = gateway.publisher.catalog.policies
    for (project, name), policy in policies.items():
        alias.add_metric((project, name), policy.alias)
    for replica in gateway.pool.replicas:
        healthy.add_metric((replica.url,), replica.healthy)
        in_flight.add_metric((replica.url,), replica.in_flight)
        for served in sorted(replica.proven):
            found = _SERVED.fullmatch(served)
            if found is not None:
                project = found["project"] or DEFAULT_PROJECT
                labels = (replica.url, project, found["policy"], found["version"])
                serves.add_metric(labels, 1)
        for (project, name), policy in policies.items():
            wanted = policy.loaded.get(policy.alias)
            lacks = wanted is None or wanted not in replica.proven
            missing.add_metric((replica.url, project, name), lacks)
    yield from (healthy, in_flight, serves, missing, alias)


def _webhooks(gateway: Gateway) -> Iterator[Metric]:
    if not gateway.deliveries:
        return
    attempts = GaugeMetricFamily(
        "strop_webhook_attempts",
        "How often the event that waits was refused",
        labels=("project", "webhook"),
    )
    for delivery in gateway.deliveries:
        attempts.add_metric((delivery.project, delivery.name), delivery.attempts)
    yield attempts
