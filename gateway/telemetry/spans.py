"""OpenTelemetry spans of the gateway itself: a request, and in it vLLM's part and the commit.

They are made from the times that were noted, after the answer has left, and sent in batches by a
thread of the SDK. Where to is said by OpenTelemetry's own variables, such as
`OTEL_EXPORTER_OTLP_ENDPOINT`. No span holds a prompt, an answer or a key.
"""

from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from gateway.telemetry.observation import Observation
from gateway.telemetry.routes import route_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

_NANO = 1_000_000_000
_CARRIED = ("traceparent", "tracestate")


class Spans:
    """Makes and sends them. A caller's `traceparent` becomes the parent."""

    def __init__(self, exporter: "SpanExporter | None" = None):
        """With the SDK's OTLP exporter, if no other is given.

        Raises:
            RuntimeError: the SDK is not installed.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ImportError as error:
            raise RuntimeError(
                f"spans need OpenTelemetry's SDK ({error}): pip install strop[otel], or set otel "
                "to false"
            ) from error
        resource = Resource.create({"service.name": "strop"})
        # Not the process's global one, which a client library may have taken for itself.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("strop")
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace

    def add(self, seen: Observation) -> None:
        """Make the spans of a request that is over."""
        headers = Headers(scope=seen.scope)
        carrier = {name: headers[name] for name in _CARRIED if name in headers}
        parent = self._propagator.extract(carrier) if carrier else None
        route = route_of(seen.scope)
        span = self._tracer.start_span(
            route,
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            start_time=int(seen.began * _NANO),
            attributes={
                "http.request.method": seen.scope["method"],
                "http.route": route.partition(" ")[2] or route,
                "http.response.status_code": seen.status,
                **_attributes(seen),
            },
        )
        if seen.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        inside = self._trace.set_span_in_context(span)
        captured = seen.captured
        if captured is not None:
            self._inner("upstream", inside, captured.created_at, captured.finished_at)
            if seen.committed:
                self._inner("commit", inside, captured.finished_at, seen.committed)
        span.end(int(seen.ended * _NANO))

    def _inner(self, name: str, inside: "Context", began: float, ended: float) -> None:
        span = self._tracer.start_span(name, context=inside, start_time=int(began * _NANO))
        span.end(int(max(began, ended) * _NANO))

    def close(self) -> None:
        """Send what waits. Blocks for some seconds at most."""
        self._provider.force_flush(5000)
        self._provider.shutdown()


def _attributes(seen: Observation) -> dict[str, Any]:
    captured = seen.captured
    if captured is None:
        return {}
    found: dict[str, Any] = {
        "strop.project": captured.project,
        "strop.completion": captured.id,
        "strop.trajectory": captured.trajectory.id,
        "strop.group": captured.trajectory.group_id,
        "strop.outcome": captured.status,
        "gen_ai.request.model": captured.policy,
        "gen_ai.response.model": captured.served_model,
        "gen_ai.usage.input_tokens": captured.prompt_tokens,
        "gen_ai.usage.output_tokens": captured.completion_tokens,
        "strop.version": captured.version,
        "strop.reason": captured.reason,
        "strop.replica": captured.replica,
    }
    if captured.first_token_at is not None:
        found["strop.first_token_seconds"] = captured.first_token_at - seen.began
    return {name: value for name, value in found.items() if value is not None}
