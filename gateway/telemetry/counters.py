"""What this process counts while it serves; one event loop adds, without a lock."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from gateway.store.histogram import Histogram
from gateway.telemetry.observation import Observation
from gateway.telemetry.routes import route_of

PHASES = ("receive", "first_token", "generation", "commit", "total")
"""`receive`: until the request was read and placed. `first_token`: from there until vLLM's first
token; of an answer that is not streamed, until all of it. `generation`: from the first token to
the last. `commit`: until the row was durable. `total`: from the first byte to the last."""


class _Completions:
    """Of one project and policy."""

    __slots__ = ("completion_tokens", "outcomes", "phases", "prompt_tokens")

    def __init__(self) -> None:
        self.phases = {phase: Histogram() for phase in PHASES}
        self.outcomes: dict[tuple[str, str], int] = {}
        self.prompt_tokens = 0
        self.completion_tokens = 0


class Counters:
    """Requests by route and status; completions, tokens and latencies by project and policy.

    Labels are few by construction: routes are those that there are, policies those that exist,
    and versions, ids and clients are no labels.
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, int], int] = {}
        self._completions: dict[tuple[str, str], _Completions] = {}

    def add(self, seen: Observation) -> None:
        """Count one request that is over."""
        key = (seen.project, route_of(seen.scope), seen.status)
        self._requests[key] = self._requests.get(key, 0) + 1
        captured = seen.captured
        if captured is None:
            return
        owner = (captured.project, captured.policy)
        of = self._completions.get(owner)
        if of is None:
            of = self._completions[owner] = _Completions()
        outcome = (captured.status, captured.reason or "")
        of.outcomes[outcome] = of.outcomes.get(outcome, 0) + 1
        of.prompt_tokens += captured.prompt_tokens or 0
        of.completion_tokens += captured.completion_tokens or 0
        phases = of.phases
        phases["receive"].add(max(0.0, captured.created_at - seen.began))
        if captured.first_token_at is not None:
            phases["first_token"].add(max(0.0, captured.first_token_at - captured.created_at))
            phases["generation"].add(max(0.0, captured.finished_at - captured.first_token_at))
        if seen.committed:
            phases["commit"].add(max(0.0, seen.committed - captured.finished_at))
        phases["total"].add(max(0.0, seen.ended - seen.began))

    def collect(self) -> Iterator[Metric]:
        """The counts as Prometheus's families."""
        requests = CounterMetricFamily(
            "strop_requests", "Requests by route and status", labels=("project", "route", "status")
        )
        for (project, route, code), count in list(self._requests.items()):
            requests.add_metric((project, route, str(code)), count)
        completions = CounterMetricFamily(
            "strop_completions",
            "Logged completions; reason: why one cannot be trained on",
            labels=("project", "policy", "status", "reason"),
        )
        tokens = CounterMetricFamily(
            "strop_tokens", "Tokens of prompts and answers", labels=("project", "policy", "kind")
        )
        phases = HistogramMetricFamily(
            "strop_completion_phase_seconds",
            "Time of a completion by phase",
            labels=("project", "policy", "phase"),
        )
        for owner, of in list(self._completions.items()):
            for (status, reason), count in list(of.outcomes.items()):
                completions.add_metric((*owner, status, reason), count)
            tokens.add_metric((*owner, "prompt"), of.prompt_tokens)
            tokens.add_metric((*owner, "completion"), of.completion_tokens)
            for phase, histogram in of.phases.items():
                phases.add_metric((*owner, phase), histogram.buckets(), histogram.sum)
        yield from (requests, completions, tokens, phases)
