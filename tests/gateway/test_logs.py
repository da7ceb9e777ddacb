"""The request log and the spans: one of each a request, and never a prompt or a key."""

import gzip
import json
import logging
import sys

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.store import keys
from gateway.telemetry.logs import JsonFormatter
from tests.gateway.conftest import MakeStrop, Running

PROMPT = "what nobody else may read"
ASK = {"model": "agent", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


async def some_requests(strop: Running) -> tuple[str, str]:
    """A key, and the id of a completion."""
    with strop.gateway.database.write() as connection:
        _, secret = keys.create(connection, "default", "", keys.SCOPES)
    key = {"authorization": f"Bearer {secret}"}
    traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    _, reply = await strop.post("/v1/chat/completions", ASK, **key, **traced)
    await strop.post("/v1/chat/completions?api_key=sk-strop-in-the-url", ASK)
    assert (await strop.get("/v1/a%0Ab"))[0] == 401
    body = {"completion_id": reply["id"], "reward": 1.0, "comment": PROMPT}
    assert (await strop.post("/v1/rewards", body, **key))[0] == 201
    return secret, reply["id"]


async def test_a_request_is_one_line_of_json(
    make_strop: MakeStrop, capsys: pytest.CaptureFixture[str]
):
    async with make_strop(log_format="json") as strop:
        secret, completion = await some_requests(strop)
    text = capsys.readouterr().err
    assert PROMPT not in text
    assert secret not in text
    assert "sk-strop" not in text
    served, refused, odd, reward = (json.loads(line) for line in text.splitlines())
    assert (served["path"], served["status"]) == ("/v1/chat/completions", 200)
    assert (served["completion"], served["trajectory"]) == (completion, TRACE)
    assert (served["policy"], served["version"], served["outcome"]) == ("agent", 0, "complete")
    assert served["completion_tokens"] == 3
    assert 0 <= served["first_token_seconds"] <= served["seconds"]
    assert (refused["status"], "completion" in refused) == (401, False)
    assert odd["path"] == "/v1/a\nb"
    assert (reward["path"], reward["status"]) == ("/v1/rewards", 201)


async def test_a_request_is_one_line_of_text(
    make_strop: MakeStrop, capsys: pytest.CaptureFixture[str]
):
    async with make_strop() as strop:
        secret, completion = await some_requests(strop)
    text = capsys.readouterr().err
    assert PROMPT not in text
    assert secret not in text
    served, refused, odd, _ = text.splitlines()
    assert " POST /v1/chat/completions 200 " in served
    assert f" agent@0 {completion} " in served
    assert " 401 " in refused
    assert r"/v1/a\nb" in odd


async def test_it_can_be_turned_off(make_strop: MakeStrop, capsys: pytest.CaptureFixture[str]):
    async with make_strop(request_log=False) as strop:
        assert (await strop.post("/v1/chat/completions", ASK))[0] == 200
    assert capsys.readouterr().err == ""


def test_an_error_in_json_carries_its_stack_on_the_same_line():
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord(
            "strop.x", logging.ERROR, "", 1, "it %s", ("broke",), sys.exc_info()
        )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == (
        "error",
        "strop.x",
        "it broke",
    )
    assert "ValueError: no" in fields["error"]


async def test_a_request_is_a_span_inside_the_trace_of_its_caller(
    make_strop: MakeStrop, monkeypatch: pytest.MonkeyPatch
):
    spans = []

    async def take(request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert PROMPT.encode() not in body
        assert b"sk-strop" not in body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            spans.extend(span for scope in resource.scope_spans for span in scope.spans)
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    async with make_strop(otel=True) as strop:
        _, completion = await some_requests(strop)
    await runner.cleanup()
    named = {span.name: span for span in spans}
    assert len(spans) == 6
    assert set(named) == {
        "POST /v1/chat/completions",
        "POST /v1/rewards",
        "unknown",
        "upstream",
        "commit",
    }
    (request,) = [s for s in spans if s.parent_span_id.hex() == PARENT]
    assert request.trace_id.hex() == TRACE
    assert request.name == "POST /v1/chat/completions"
    values = {item.key: item.value for item in request.attributes}
    assert values["strop.completion"].string_value == completion
    assert values["http.response.status_code"].int_value == 200
    for name in ("upstream", "commit"):
        inner = named[name]
        assert (inner.trace_id, inner.parent_span_id) == (request.trace_id, request.span_id)
        assert request.start_time_unix_nano <= inner.start_time_unix_nano
        assert inner.end_time_unix_nano <= request.end_time_unix_nano
