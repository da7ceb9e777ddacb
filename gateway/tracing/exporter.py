"""Sending to Langfuse: spans as OpenTelemetry's protobuf, scores by its API.

The SDK's own client gives up after a few attempts and says so only in a log. Here its parts are
used one by one (its attributes, its headers, its API client), and every answer is told apart:
accepted, refused, or to be tried again.
"""

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import httpx
import langfuse
from langfuse._client.attributes import create_generation_attributes, create_span_attributes
from langfuse._client.constants import LANGFUSE_TRACER_NAME
from langfuse.api import LangfuseAPI
from langfuse.api.core import ApiError
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from pydantic import ValidationError

from gateway.store.records import Json
from gateway.tracing.observations import Observation
from gateway.tracing.settings import LangfuseProject

_NAMES = langfuse.LangfuseOtelSpanAttributes
REQUEST_BYTES = 4_000_000
"""Most bytes of one request of spans, before they are compressed: Langfuse takes 4.5 MB."""

_REFUSALS = (400, 413, 422)
"""What is wrong with the request itself; all else may pass, wrong keys and addresses too."""


class TryAgain(Exception):
    """Langfuse did not take it now.

    `after` is the number of seconds that it asked for, if it did.
    """

    def __init__(self, message: str, after: float | None = None):
        super().__init__(message)
        self.after = after


class Refused(Exception):
    """Langfuse does not take all of it: of one thing, that one; of several, some of them."""


class Exporter:
    """One project of Langfuse. Blocks; used by one thread."""

    def __init__(self, project: LangfuseProject, environment: str = "", timeout: float = 10.0):
        self._http = httpx.Client(timeout=timeout)
        self._traces = f"{project.base_url}/api/public/otel/v1/traces"
        version = langfuse.__version__
        self._headers = {
            "Authorization": "Basic "
            + b64encode(f"{project.public_key}:{project.secret_key}".encode()).decode(),
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "gzip",
            "x-langfuse-sdk-name": "python",
            "x-langfuse-sdk-version": version,
            "x-langfuse-public-key": project.public_key,
            "x-langfuse-ingestion-version": "4",
        }
        self.api = LangfuseAPI(
            base_url=project.base_url,
            username=project.public_key,
            password=project.secret_key,
            x_langfuse_sdk_name="python",
            x_langfuse_sdk_version=version,
            x_langfuse_public_key=project.public_key,
            httpx_client=self._http,
            timeout=timeout,
        )
        self._environment = environment
        self._resource = Resource({"service.name": "strop"})
        self._scope = InstrumentationScope(
            LANGFUSE_TRACER_NAME, version, attributes={"public_key": project.public_key}
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def span(self, observation: Observation) -> ReadableSpan:
        """An observation as OpenTelemetry has it, under its own id and times."""
        trace = int(observation.trace_id, 16)

        def context(span_id: str, remote: bool) -> SpanContext:
            return SpanContext(trace, int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED))

        parent = observation.parent_id
        attributes = _attributes(observation)
        if self._environment:
            attributes[_NAMES.ENVIRONMENT] = self._environment
        failed = observation.level == "ERROR"
        return ReadableSpan(
            name=observation.name,
            context=context(observation.id, False),
            parent=context(parent, True) if parent is not None else None,
            resource=self._resource,
            attributes=attributes,
            instrumentation_scope=self._scope,
            status=Status(StatusCode.ERROR, observation.status_message) if failed else Status(),
            start_time=int(observation.start * 1e9),
            end_time=int(max(observation.end, observation.start) * 1e9),
        )

    def send_spans(self, spans: Sequence[ReadableSpan]) -> None:
        """Send spans in one request, or in several if they are more than Langfuse takes in one.

        Raises:
            TryAgain, Refused: some of them may have been taken all the same.
        """
        encoded = encode_spans(spans).SerializeToString()
        if len(encoded) > REQUEST_BYTES and len(spans) > 1:
            self.send_spans(spans[: len(spans) // 2])
            self.send_spans(spans[len(spans) // 2 :])
            return
        body = gzip.compress(encoded, compresslevel=3)
        try:
            answer = self._http.post(self._traces, content=body, headers=self._headers)
        except httpx.HTTPError as error:
            raise _away(error) from error
        if not answer.is_success:
            raise _failure(answer.status_code, answer.headers, answer.text)
        rejected, message = _partial_success(answer)
        if rejected:
            raise Refused(message or f"{rejected} spans were rejected")

    def send_scores(self, scores: Sequence[Json]) -> None:
        """Create scores, or replace those of the same ids, in one request.

        Raises:
            TryAgain, Refused
        """
        request: Any = list(scores)
        try:
            answer: Any = self.api.scores.create(
                request=request, request_options={"max_retries": 0}
            )
        except Exception as error:
            raise classified(error) from error
        if getattr(answer, "rejected", 0):
            messages = {error.message for error in answer.errors}
            raise Refused("; ".join(sorted(messages)) or f"{answer.rejected} scores were rejected")

    def delete_score(self, score_id: str) -> None:
        """Delete a score; one that is not there is deleted already.

        Raises:
            TryAgain, Refused
        """
        try:
            self.api.scores.delete(score_id, request_options={"max_retries": 0})
        except ApiError as error:
            if error.status_code != 404:
                raise classified(error) from error
        except Exception as error:
            raise classified(error) from error


def classified(error: Exception) -> TryAgain | Refused:
    """What an exception of the API client means."""
    if isinstance(error, ApiError):
        status = error.status_code or 0
        if status >= 300:
            body = (
                error.body if isinstance(error.body, str) else json.dumps(error.body, default=str)
            )
            return _failure(status, error.headers or {}, body)
        return TryAgain(f"Langfuse's answer was cut or is no JSON: {str(error.body)[:200]!r}")
    if isinstance(error, httpx.HTTPError):
        return _away(error)
    if isinstance(error, ValidationError | ValueError):
        return TryAgain(f"Langfuse's answer makes no sense: {str(error)[:200]}")
    raise error


def _away(error: httpx.HTTPError) -> TryAgain:
    return TryAgain(f"Langfuse does not answer: {str(error) or type(error).__name__}")


def _failure(status: int, headers: Any, body: str) -> TryAgain | Refused:
    message = f"Langfuse answered {status}: {body[:300]}"
    if status in _REFUSALS:
        return Refused(message)
    if status in (401, 403):
        message += " (are the keys of this Langfuse?)"
    elif status < 400 or status == 404:
        message += " (is base_url the address of Langfuse?)"
    return TryAgain(message, _retry_after(headers))


def _retry_after(headers: Any) -> float | None:
    value = {str(k).lower(): v for k, v in dict(headers).items()}.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None


def _partial_success(answer: httpx.Response) -> tuple[int, str]:
    if "json" in answer.headers.get("content-type", ""):
        try:
            found = answer.json().get("partialSuccess") or {}
            return int(found.get("rejectedSpans") or 0), str(found.get("errorMessage") or "")
        except (ValueError, AttributeError, TypeError) as error:
            raise TryAgain(f"Langfuse's answer makes no sense: {answer.text[:200]!r}") from error
    response = ExportTraceServiceResponse()
    try:
        response.ParseFromString(answer.content)
    except Exception as error:
        raise TryAgain(f"Langfuse's answer is cut: {answer.content[:100]!r}") from error
    return response.partial_success.rejected_spans, response.partial_success.error_message


def _attributes(observation: Observation) -> Json:
    common: Json = {
        "metadata": observation.metadata,
        "input": observation.input,
        "output": observation.output,
        "version": observation.version,
        "level": observation.level,
        "status_message": observation.status_message,
    }
    if observation.kind == "agent":
        attributes: Json = create_span_attributes(observation_type="agent", **common)
    else:
        attributes = create_generation_attributes(
            completion_start_time=observation.first_token,
            model=observation.model,
            model_parameters=observation.parameters,
            usage_details=observation.usage or None,
            cost_details={"total": observation.cost} if observation.cost is not None else None,
            **common,
        )
    trace = observation.trace
    named = {
        _NAMES.TRACE_NAME: trace.get("name"),
        _NAMES.TRACE_SESSION_ID: trace.get("session"),
        _NAMES.TRACE_TAGS: trace.get("tags") or None,
    }
    attributes.update({name: value for name, value in named.items() if value is not None})
    if observation.parent_id is None:
        attributes[_NAMES.IS_APP_ROOT] = True
    return attributes
