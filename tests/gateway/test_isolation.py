"""Every route, asked with the key of another project: nothing of the first one can be read,
rewarded, grouped, listed, changed or deleted.

A route that has no case in `isolation_cases` fails the first test. Each case that names something of the first
project is also asked with that project's own key, and must succeed: what is refused is the key.
"""

import hashlib
import hmac
import io
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import requests
from sqlalchemy import Table, insert, select

from gateway.app import build
from gateway.auth import COOKIE
from gateway.store import keys, queries, retention
from gateway.store.base import Base
from gateway.store.models import Completion, Event, Step
from tests.gateway.conftest import Running
from tests.gateway.isolation_cases import (
    CASES,
    COMMENT,
    GROUP,
    KIND,
    OWNER,
    POLICY,
    PROMPT,
    TRAJECTORY,
    UNDER,
    Case,
    chat,
)
from tests.gateway.threaded import in_a_thread


def test_every_route_has_a_case():
    app = build()
    routes = {
        (method, route.path)
        for route in app.routes
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD"
    }
    routes |= {
        (method.upper(), path)
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    }
    routes |= {("POST", path) for path in app.hot}
    # How much of a path a name may take makes no other route of it.
    assert {(case.method, _plain(case.path)) for case in CASES} == {
        (method, _plain(path)) for method, path in routes
    }


def _plain(path: str) -> str:
    return path.replace(":path}", "}")


class Tenants:
    """A gateway with two projects: `ours` has something of everything, `theirs` has a policy."""

    def __init__(self, strop: Running):
        self.strop = strop
        with strop.gateway.database.write() as connection:
            self.keys = {
                project: keys.create(connection, project, "test", keys.SCOPES)[1]
                for project in ("ours", "theirs")
            }
        self.expect("ours", "/v1/policies", {"name": POLICY}, 201)
        for project in self.keys:
            self.expect(project, "/v1/policies", {"name": "agent"}, 201)
        asked = chat(messages=[{"role": "user", "content": PROMPT}], metadata={"owner": OWNER})
        first, second, third = (
            self.expect("ours", f"{UNDER}/v1/chat/completions", asked)["id"] for _ in range(3)
        )
        reward = {"completion_id": first, "reward": 0.123, "comment": COMMENT}
        self.expect("ours", "/v1/rewards", reward, 201)
        self.expect("ours", "/v1/rewards", {**reward, "completion_id": third}, 201)
        theirs = self.expect("theirs", "/v1/chat/completions", chat("agent"))
        with strop.gateway.database.write() as connection:
            now = time.time()
            step = connection.execute(
                insert(Step)
                .values(project="ours", policy=POLICY, state="done", config={"secret": COMMENT},
                        started_at=now, worker="w", parent_version=0)
                .returning(Step.id)
            ).scalar_one()  # fmt: skip
            connection.execute(
                insert(Event).values(project="ours", policy=POLICY, kind=KIND, detail={}, at=1.0)
            )
            connection.execute(
                insert(Event).values(project="theirs", policy="agent", kind="last", detail={}, at=2)
            )
            retention.keep(connection, "ours", 123.25)
            logged = queries.completion(connection, "ours", first)
        said = logged.response["choices"][0]["message"]["content"]
        tail = first.removeprefix("chatcmpl-")
        self.names = {
            "completion_id": first,
            "second_completion_id": second,
            "their_completion_id": theirs["id"],
            "response_id": f"resp_{tail}",
            "message_id": f"msg_{tail}",
            "trajectory_id": TRAJECTORY,
            "group_id": GROUP,
            "name": POLICY,
            "step_id": str(step),
            "replica": strop.vllm.url.removeprefix("http://"),
        }
        self.hidden = {POLICY, TRAJECTORY, GROUP, PROMPT, COMMENT, OWNER, KIND, tail}
        self.hidden |= {second, third, said}
        self.hidden |= {"0.123", "123.25"}

    def expect(self, project: str, path: str, body: Any, status: int = 200) -> Any:
        answer = requests.post(
            self.strop.url + path,
            json=body,
            headers={"authorization": f"Bearer {self.keys[project]}"},
        )
        assert answer.status_code == status, answer.text
        return answer.json()

    def fill(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if isinstance(value, str):
            return re.sub(r"\{(\w+)\}", lambda match: self.names[match[1]], value)
        return value

    def ask(self, project: str, case: Case) -> tuple[int, str, str]:
        """Status and text of an answer, and all that was said in the request."""
        key = self.keys[project]
        path, body, form = self.fill(case.ask or case.path), self.fill(case.body), None
        headers = {**case.headers, "authorization": f"Bearer {key}"}
        cookies = {}
        if case.form is not None:
            secret = hashlib.sha256(key.encode()).digest()
            token = hmac.digest(secret, b"strop forms", "sha256").hex()
            form, cookies = {**self.fill(case.form), "token": token}, {COOKIE: key}
            del headers["authorization"]
        with requests.request(
            case.method,
            self.strop.url + path,
            json=body,
            data=form,
            headers=headers,
            cookies=cookies,
            stream=True,
            timeout=(60, 60),
        ) as answer:
            streamed = path in ("/v1/events", "/ui/live")
            shown = begun(answer) if streamed else text_of(answer)
            said = f"{path} {body} {form} {case.headers}"
            return answer.status_code, shown + str(answer.headers), said

    def rows(self) -> dict[str, list[Any]]:
        """All that the database holds of the first project."""
        found = {}
        with self.strop.gateway.database.read() as connection:
            ids = set(
                connection.execute(
                    select(Completion.id).where(Completion.project == "ours")
                ).scalars()
            )
            for name, table in Base.metadata.tables.items():
                rows = connection.execute(select(table)).mappings().all()
                found[name] = sorted(repr(dict(row)) for row in rows if is_ours(table, row, ids))
        return found


def is_ours(table: Table, row: Any, completions: set[str]) -> bool:
    if "project" in table.c:
        return bool(row["project"] == "ours")
    if "completion_id" in table.c:
        return row["completion_id"] in completions
    # Nobody's own: leases of parts of strop, and drained replicas.
    return table.name == "drains"


def text_of(answer: requests.Response) -> str:
    if "parquet" not in answer.headers.get("content-type", ""):
        return answer.text
    return repr(pyarrow.parquet.read_table(io.BytesIO(answer.content)).to_pylist())


def begun(answer: requests.Response) -> str:
    """What a stream without end begins with: up to the newest event, or its first line."""
    found = ""
    with suppress(requests.ConnectionError):
        for line in answer.iter_lines(decode_unicode=True):
            found += f"{line}\n"
            if line in ("event: last", f"event: {KIND}", "retry: 3000"):
                break
    return found


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    with in_a_thread(tmp_path_factory.mktemp("isolation")) as strop:
        yield Tenants(strop)


def name_of(case: Case) -> str:
    return f"{case.method} {case.ask or case.path}"


# Last those that make the names known in the other project too.
@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case.makes), ids=name_of)
def test_a_key_of_another_project_reads_and_changes_nothing(tenants: Tenants, case: Case):
    before = tenants.rows()
    status, shown, said = tenants.ask("theirs", case)
    assert status in case.theirs, shown
    # What the request itself names may be said back; all else of the first project may not.
    leaked = [hidden for hidden in tenants.hidden if hidden in shown and hidden not in said]
    assert leaked == []
    after = tenants.rows()
    for table, rows in before.items():
        assert after[table] == rows, table


def test_the_same_requests_work_with_the_projects_own_key(tmp_path: Path):
    with in_a_thread(tmp_path) as strop:
        tenants = Tenants(strop)
        found = {name: len(list(rows)) for name, rows in tenants.rows().items() if rows}
        wrong = []
        for case in CASES:
            if case.ours is None:
                continue
            status, shown, _ = tenants.ask("ours", case)
            if status != case.ours:
                wrong.append((name_of(case), case.body, status, shown[:300]))
        assert wrong == []
    # The first test compares something.
    assert {"policies", "versions", "groups", "trajectories", "completions", "choices",
            "rewards", "steps", "events", "retention"} <= found.keys()  # fmt: skip
