"""Every route, with requests made up from the OpenAPI description: see `schemathesis`.

`STROP_FUZZ_EXAMPLES` says how many requests each route gets of each kind; a few hundred take a
quarter of an hour. The requests are the same in every run of the same number.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app import build
from tests.gateway.conftest import Running
from tests.gateway.threaded import in_a_thread
from tests.store import conftest as store

postgres = store.postgres


@schemathesis.serializer("application/x-ndjson")
def as_lines(_: Any, value: Any) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else orjson.dumps(value)


EXAMPLES = int(os.environ.get("STROP_FUZZ_EXAMPLES", "3"))
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

SCHEMA = schemathesis.openapi.from_dict(build().openapi())
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]
# Last those that change what the others are answered from.
OPERATIONS.sort(key=lambda operation: "inference" not in (operation.tags or []))
LABELS = [operation.label for operation in OPERATIONS]


KEY = "sk-fuzz"


@pytest.fixture(scope="module", params=["SQLite, no keys", "PostgreSQL, a key"])
def strop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    options: dict[str, Any] = {}
    if request.param == "PostgreSQL, a key":
        server = request.getfixturevalue("postgres")
        server.psql("CREATE DATABASE fuzz")
        options = {"admin_key": KEY, "database_url": server.get_uri("fuzz")}
    with in_a_thread(tmp_path_factory.mktemp("fuzz"), **options) as found:
        # Importing LiteLLM takes longer than a request may.
        ask = {"model": "agent", "input": "Hello."}
        send(found, "POST", "/v1/responses/input_tokens", ask)
        yield found


def send(strop: Running, method: str, path: str, body: Any = None) -> Any:
    headers = {"authorization": f"Bearer {KEY}"}
    return requests.request(method, strop.url + path, json=body, headers=headers).json()


def names_in_use(strop: Running) -> dict[str, str]:
    """Values of path parameters under which there is something."""
    ask = [{"role": "user", "content": "Hello."}]
    body = {"model": "agent", "messages": ask, "max_tokens": 3}
    made = send(strop, "POST", "/rollouts/g/t/v1/chat/completions", body)
    send(strop, "POST", "/v1/rewards", {"completion_id": made["id"], "reward": 1.0})
    return {
        "completion_id": made["id"],
        "id": made["id"].replace("chatcmpl-", "resp_"),
        "trajectory_id": "t",
        "group_id": "g",
        "name": "agent",
        "model": "agent",
    }


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("label", LABELS)
def test_no_request_makes_it_fail_or_answer_otherwise_than_described(strop: Running, label: str):
    operation = next(o for o in OPERATIONS if o.label == label)
    known = names_in_use(strop)
    headers = {"authorization": f"Bearer {KEY}"}

    def check(case: Case, meant: bool) -> None:
        if meant:
            # Made up alone, hardly any name is that of something.
            for name in case.path_parameters or {}:
                case.path_parameters[name] = known.get(name, case.path_parameters[name])
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "agent"
        # Long, because the machine may be busy: how fast it is, is measured elsewhere.
        response = case.call(base_url=strop.url, headers=headers, timeout=120)
        case.validate_response(response, checks=CHECKS)

    # Under `/rollouts` is what is there without it too.
    number = EXAMPLES if "/rollouts/" not in label else (EXAMPLES + 3) // 4
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        try_out(check, operation.as_strategy(generation_mode=mode), number)


def try_out(check: Callable[[Case, bool], None], cases: Any, number: int) -> None:
    @settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases, st.integers(0, 2).map(bool))
    def once(case: Case, meant: bool) -> None:
        check(case, meant)

    once()


def test_without_the_key_nothing_is_answered(strop: Running):
    if not strop.gateway.settings.admin_key:
        return
    for operation in OPERATIONS:
        path = operation.path.replace("{", "").replace("}", "")
        answer = requests.request(operation.method, strop.url + path, json={})
        assert answer.status_code == (200 if path in ("/healthz", "/readyz") else 401), path
