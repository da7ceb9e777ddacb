"""Langfuse's HTTP API over dictionaries: takes spans and scores, answers the score API with them.

In a test:

    async with FakeLangfuse() as langfuse:
        langfuse.url, langfuse.spans, langfuse.scores

It enforces the limits of the real one (bytes, numbers, keys) and misbehaves when it is told to:
`faults` holds what the next requests meet, `refuses` and `refuses_score` say what is never taken.
"""

import asyncio
import gzip
import json
from base64 import b64decode
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

Json = dict[str, Any]

EVENT_LIMIT = 1_000_000
REQUEST_LIMIT = 4_500_000
SCORES_LIMIT = 1_048_576
BATCH_LIMIT = 500


@dataclass
class Fault:
    """What one request meets."""

    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    how: str = "status"
    """`status`, `hang_up` (before anything was taken), `half` (taken, and the answer is cut), or
    `garbage` (taken, and the answer is no answer)."""


@dataclass
class Span:
    """A span as it came."""

    trace_id: str
    id: str
    parent_id: str
    name: str
    start: int
    end: int
    attributes: Json
    status: int
    bytes: int

    def get(self, name: str) -> Any:
        """`langfuse.observation.<name>`, decoded where it is JSON."""
        value = self.attributes.get(f"langfuse.observation.{name}")
        if isinstance(value, str) and value[:1] in '[{"':
            return json.loads(value)
        return value

    @property
    def metadata(self) -> Json:
        prefix = "langfuse.observation.metadata."
        found = {k: v for k, v in self.attributes.items() if k.startswith(prefix)}
        return {k.removeprefix(prefix): json.loads(v) for k, v in found.items()}


class FakeLangfuse:
    """One fake server, with one project."""

    def __init__(self, public_key: str = "pk-lf-test", secret_key: str = "sk-lf-test"):
        self.public_key, self.secret_key = public_key, secret_key
        self.spans: dict[tuple[str, str], Span] = {}
        self.scores: dict[str, Json] = {}
        self.requests: Counter[str] = Counter()
        self.batches: list[int] = []
        self.problems: list[str] = []
        """Limits that were broken, and repeats that differed in place or time."""
        self.faults: deque[Fault] = deque()
        self.refuses: Callable[[Span], bool] = lambda span: False
        self.refuses_score: Callable[[Json], bool] = lambda score: False
        self.down = False
        self.page = 100
        self.url = ""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/api/public/otel/v1/traces", self._traces)
        app.router.add_post("/api/public/scores", self._create_scores)
        app.router.add_delete("/api/public/scores/{id}", self._delete_score)
        app.router.add_get("/api/public/v3/scores", self._list_scores)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def generation(self, completion_id: str) -> Span:
        """The generation of a completion."""
        (found,) = (
            s for s in self.spans.values() if s.metadata.get("completion_id") == completion_id
        )
        return found

    def agent(self, trajectory_id: str) -> Span:
        """The agent observation of a trajectory."""
        (found,) = (
            s
            for s in self.spans.values()
            if s.get("type") == "agent" and s.metadata["trajectory_id"] == trajectory_id
        )
        return found

    def trace_bytes(self) -> Counter[str]:
        """Bytes of each trace."""
        sizes: Counter[str] = Counter()
        for span in self.spans.values():
            sizes[span.trace_id] += span.bytes
        return sizes

    def annotate(self, trace_id: str, observation_id: str | None = None, **values: Any) -> Json:
        """Put a score on something, as a person does in the UI."""
        now = datetime.now(UTC)
        score = {
            "id": f"score-{len(self.scores)}-{now.timestamp()}",
            "traceId": trace_id,
            "observationId": observation_id,
            "name": "quality",
            "value": 1.0,
            "dataType": "NUMERIC",
            "source": "ANNOTATION",
            "timestamp": now.isoformat(),
            "updatedAt": now.isoformat(),
            **values,
        }
        self.scores[score["id"]] = score
        return score

    def edit(self, score_id: str, **values: Any) -> None:
        """Change a score."""
        updated = datetime.now(UTC).isoformat()
        self.scores[score_id] = {**self.scores[score_id], "updatedAt": updated, **values}

    async def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.02)

    async def _meet(self, request: web.Request, kind: str) -> tuple[bytes, Fault | None]:
        self.requests[kind] += 1
        body = await request.read()
        if self.down:
            assert request.transport is not None
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        keys = f"{self.public_key}:{self.secret_key}"
        if scheme != "Basic" or b64decode(value).decode() != keys:
            raise web.HTTPUnauthorized(text=json.dumps({"message": "Invalid credentials."}))
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.how == "hang_up":
            assert request.transport is not None
            request.transport.abort()
        if fault is not None and fault.how == "status":
            raise _Status(fault)
        return body, fault

    async def _answer(
        self, request: web.Request, fault: Fault | None, status: int, body: bytes, kind: str
    ) -> web.StreamResponse:
        if fault is not None and fault.how == "garbage":
            return web.Response(status=200, body=b"\xff<html>", content_type=kind)
        if fault is None or fault.how != "half":
            return web.Response(status=status, body=body, content_type=kind)
        response = web.StreamResponse(status=status, headers={"content-type": kind})
        response.content_length = len(body) + 50
        await response.prepare(request)
        await response.write(body[: len(body) // 2] or b"x")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _traces(self, request: web.Request) -> web.StreamResponse:
        try:
            raw, fault = await self._meet(request, "traces")
        except _Status as status:
            return status.response()
        if request.headers.get("content-encoding") == "gzip" and raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        if len(raw) > REQUEST_LIMIT:
            self.problems.append(f"a request of {len(raw)} bytes")
            return web.json_response({"message": "body too large"}, status=413)
        found = _spans(raw, self.public_key)
        self.batches.append(len(found))
        if len(found) > BATCH_LIMIT:
            self.problems.append(f"a batch of {len(found)}")
            return web.json_response({"message": "batch too large"}, status=400)
        answer = ExportTraceServiceResponse()
        for span in found:
            if self.refuses(span):
                answer.partial_success.rejected_spans += 1
                answer.partial_success.error_message = f"{span.name} is not wanted"
                continue
            if span.bytes > EVENT_LIMIT:
                self.problems.append(f"a span of {span.bytes} bytes")
            before = self.spans.get((span.trace_id, span.id))
            if before is not None and (before.start, before.parent_id) != (
                span.start,
                span.parent_id,
            ):
                self.problems.append(f"{span.id} was {before} and is {span}")
            self.spans[span.trace_id, span.id] = span
        body = answer.SerializeToString()
        return await self._answer(request, fault, 200, body, "application/x-protobuf")

    async def _create_scores(self, request: web.Request) -> web.StreamResponse:
        try:
            raw, fault = await self._meet(request, "scores")
        except _Status as status:
            return status.response()
        if len(raw) > SCORES_LIMIT:
            self.problems.append(f"scores of {len(raw)} bytes")
            return web.json_response({"message": "body too large"}, status=413)
        sent = json.loads(raw)
        bad = [score for score in sent if self.refuses_score(score)]
        for score in sent:
            if score in bad:
                continue
            before = self.scores.get(score["id"])
            if before is not None and before["timestamp"] != score["timestamp"]:
                self.problems.append(f"{score['id']} was moved in time")
            updated = datetime.now(UTC).isoformat()
            self.scores[score["id"]] = {"source": "API", "updatedAt": updated, **score}
        if bad:
            errors = [{"message": f"{score['name']} is not wanted"} for score in bad]
            counts = {"accepted": len(sent) - len(bad), "rejected": len(bad), "errors": errors}
            body = json.dumps(counts).encode()
            return await self._answer(request, fault, 207, body, "application/json")
        body = b'{"message":"Accepted"}'
        return await self._answer(request, fault, 202, body, "application/json")

    async def _delete_score(self, request: web.Request) -> web.StreamResponse:
        try:
            _, fault = await self._meet(request, "deletes")
        except _Status as status:
            return status.response()
        if self.scores.pop(request.match_info["id"], None) is None:
            return web.json_response({"message": "Score not found"}, status=404)
        return await self._answer(request, fault, 202, b"{}", "application/json")

    async def _list_scores(self, request: web.Request) -> web.StreamResponse:
        try:
            _, fault = await self._meet(request, "lists")
        except _Status as status:
            return status.response()
        asked = request.query
        limit = min(int(asked.get("limit", 50)), self.page)
        if int(asked.get("limit", 50)) > 100:
            return web.json_response({"message": "limit"}, status=400)
        found = sorted(self.scores.values(), key=lambda s: (s["timestamp"], s["id"]), reverse=True)
        for key, of in (("name", "name"), ("id", "id"), ("source", "source")):
            if key in asked:
                found = [s for s in found if s[of] in asked[key].split(",")]
        if "fromTimestamp" in asked:
            since = _time(asked["fromTimestamp"])
            found = [s for s in found if _time(s["timestamp"]) >= since]
        at = int(asked.get("cursor", 0))
        meta: Json = {"limit": limit}
        if at + limit < len(found):
            meta["cursor"] = str(at + limit)
        body = json.dumps({"data": [_shown(s) for s in found[at : at + limit]], "meta": meta})
        return await self._answer(request, fault, 200, body.encode(), "application/json")


class _Status(Exception):
    def __init__(self, fault: Fault):
        self.fault = fault

    def response(self) -> web.Response:
        body = {"message": f"fault {self.fault.status}"}
        return web.json_response(body, status=self.fault.status, headers=self.fault.headers)


def _spans(raw: bytes, public_key: str) -> list[Span]:
    request = ExportTraceServiceRequest.FromString(raw)
    found = []
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            owner = {a.key: a.value.string_value for a in scope.scope.attributes}
            assert owner.get("public_key") == public_key, owner
            for span in scope.spans:
                found.append(
                    Span(
                        trace_id=span.trace_id.hex(),
                        id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        name=span.name,
                        start=span.start_time_unix_nano,
                        end=span.end_time_unix_nano,
                        attributes={a.key: _value(a.value) for a in span.attributes},
                        status=span.status.code,
                        bytes=span.ByteSize(),
                    )
                )
    return found


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def _shown(score: Json) -> Json:
    observation = score.get("observationId")
    subject = (
        {"kind": "observation", "id": observation, "traceId": score["traceId"]}
        if observation
        else {"kind": "trace", "id": score["traceId"]}
    )
    value = bool(score["value"]) if score["dataType"] == "BOOLEAN" else score["value"]
    return {
        "id": score["id"],
        "projectId": "p",
        "name": score["name"],
        "value": value,
        "dataType": score["dataType"],
        "source": score["source"],
        "timestamp": score["timestamp"],
        "environment": "default",
        "createdAt": score["timestamp"],
        "updatedAt": score["updatedAt"],
        "comment": score.get("comment"),
        "metadata": score.get("metadata"),
        "authorUserId": score.get("authorUserId"),
        "subject": subject,
    }


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return found if found.tzinfo else found + timedelta()
