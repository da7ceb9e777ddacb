"""`strop export` and `strop import`, on SQLite and PostgreSQL, and `GET /v1/export`."""

import asyncio
import io
import json
import sys
import tracemalloc
from pathlib import Path

import pyarrow.parquet
import pytest
from typer import Typer
from typer.testing import CliRunner

from gateway.commands.export import data_app
from gateway.store import Database, export, queries, rewards
from gateway.store.writer import Writer
from tests.gateway.conftest import Running
from tests.store import conftest as store
from tests.store.conftest import Captured
from tests.store.test_deletion import write_thread

captured, database, writer = store.captured, store.database, store.writer
empty_url, postgres = store.empty_url, store.postgres

ALL = export.Selection("default")
ASK = [{"role": "user", "content": "Hello."}]


def answer(text: str) -> dict:
    message = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def command(database: Database, *arguments: str, **options):
    app = Typer()
    app.add_typer(data_app)
    url = database.url.render_as_string(hide_password=False)
    runner = CliRunner(env={"STROP_DATABASE_URL": url})
    return runner.invoke(app, [str(argument) for argument in arguments], **options)


def exported(database: Database, path: Path, *options: str) -> list[dict]:
    result = command(database, "export", path, *options)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in path.read_text().splitlines()]


def reward(database: Database, *values: rewards.NewReward) -> None:
    with database.write() as connection:
        rewards.post(connection, "default", values)


async def test_a_chat_is_exported_once_with_all_of_its_turns(
    database: Database, writer: Writer, captured: Captured, tmp_path: Path
):
    *_, last = await write_thread(writer, captured, 3, response=answer("fine"))
    reward(database, rewards.NewReward(0.5, trajectory_id="t", name="speed"))
    (line,) = exported(database, tmp_path / "log.jsonl")
    roles = [message["role"] for message in line["messages"]]
    assert roles == ["user", "assistant"] * 3
    assert line["messages"][-1]["content"] == "fine"
    assert (line["reward"], line["model"], line["created"]) == (0.5, "agent", 1002.0)
    assert line["strop"]["completion_id"] == last
    assert [r["name"] for r in line["strop"]["rewards"]] == ["speed"]


async def test_branches_and_choices_are_chats_of_their_own(
    database: Database, writer: Writer, captured: Captured, tmp_path: Path
):
    root = captured(thread_key=b"root", response=answer("root"))
    (tail,) = (await writer.store(root)).values()
    for number in range(2):
        messages = [*root.messages, {"role": "user", "content": str(number)}]
        reply = answer(f"branch {number}")
        reply["choices"].append({**answer("second")["choices"][0], "index": 1})
        at = 1001.0 + number
        item = captured(messages=messages, tail=tail, response=reply, created_at=at)
        await writer.store(item)
        reward(database, rewards.NewReward(10.0**number, completion_id=item.id))
    reward(database, rewards.NewReward(100.0, trajectory_id="t"))
    reward(database, rewards.NewReward(200.0, trajectory_id="t"))
    lines = exported(database, tmp_path / "log.jsonl")
    said = [line["messages"][-1]["content"] for line in lines]
    # A turn's reward counts for the whole episode, and so for all of its lines.
    assert said == ["branch 0", "second", "branch 1", "second"]
    assert [line["reward"] for line in lines] == [211.0] * 4


async def test_the_reward_of_a_chat_is_the_trainers_score(
    database: Database, writer: Writer, captured: Captured
):
    from trainer import scores

    item = captured()
    item.choices.append(type(item.choices[0])(1, "stop", [7], [-0.1]))
    await writer.store(item)
    other = captured(created_at=1001.0)
    await writer.store(other)
    reward(
        database,
        rewards.NewReward(1.0, completion_id=item.id, choice=0),
        rewards.NewReward(2.0, completion_id=item.id, choice=1),
        rewards.NewReward(3.0, completion_id=item.id, choice=1),
        rewards.NewReward(4.0, completion_id=other.id, name="speed"),
        rewards.NewReward(5.0, completion_id=other.id, choice=0, name="speed"),
        rewards.NewReward(7.0, trajectory_id="t"),
    )
    weights = {"speed": 0.1}
    with database.read() as connection:
        trajectory = queries.trajectory(connection, "default", "t")
    score = scores.score(trajectory, weights)
    found = {(a.completion.id, a.choice): a.reward for a in export.answers(trajectory, weights)}
    assert found == {
        **{(key.completion_id, key.choice): value for key, value in score.choices.items()},
        (other.id, 0): score.whole,
    }


async def test_openais_format_holds_what_fine_tuning_takes_and_nothing_else(
    database: Database, writer: Writer, captured: Captured, tmp_path: Path
):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    for number, value in enumerate((0.2, 0.8, None)):
        name = f"t{number}"
        item = captured(name, request={"model": "agent", "tools": tools}, response=answer(name))
        await writer.store(item)
        if value is not None:
            reward(database, rewards.NewReward(value, trajectory_id=name))
    path = tmp_path / "log.jsonl"
    (line,) = exported(database, path, "--format", "openai", "--min-reward", "0.5")
    assert line == {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "t1"},
        ],
        "tools": tools,
    }
    assert len(exported(database, path, "--format", "openai")) == 3


async def test_a_selection_is_by_policy_and_split(
    database: Database, writer: Writer, captured: Captured, tmp_path: Path
):
    first = captured("a", response=answer("a"))
    first.trajectory.split = "eval"
    await writer.store(first)
    await writer.store(captured("b", policy="other", response=answer("b")))
    path = tmp_path / "log.jsonl"

    def said(*options: str) -> list[str]:
        return [line["messages"][-1]["content"] for line in exported(database, path, *options)]

    assert said() == ["a", "b"]
    assert said("--split", "eval") == ["a"]
    assert said("--policy", "other") == ["b"]
    assert said("--project", "elsewhere") == []


async def test_failures_are_no_chats(
    database: Database, writer: Writer, captured: Captured, tmp_path: Path
):
    broken = {"error": {"message": "no"}}
    await writer.store(captured("a", status="error", response=broken, choices=[]))
    await writer.store(captured("b", status="aborted", response=answer("half")))
    await writer.store(captured("c", status="aborted", response=None, choices=[]))
    assert exported(database, tmp_path / "log.jsonl") == []


async def test_parquet_holds_the_exact_tokens_of_every_answer(
    database: Database, writer: Writer, captured: Captured, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(export, "_ROWS", 3)
    await write_thread(writer, captured, 4, response=answer("fine"))
    await writer.store(captured("u", prompt_ids=None, answer_ids=None, reason="no_token_ids"))
    reward(database, rewards.NewReward(0.5, trajectory_id="t"))
    path = tmp_path / "log.parquet"
    result = command(database, "export", path)
    assert result.exit_code == 0, result.output
    rows = pyarrow.parquet.read_table(path).to_pylist()
    with database.read() as connection:
        found = queries.trajectories(connection, "default", ["t", "u"])
    stored = {c.id: c for trajectory in found for c in trajectory.completions}
    assert len(rows) == len(stored) == 5
    for row in rows:
        completion = stored[row["completion_id"]]
        (choice,) = completion.choices
        assert row["prompt_token_ids"] == completion.prompt_ids
        assert (row["token_ids"], row["logprobs"]) == (choice.token_ids, choice.logprobs)
        assert json.loads(row["messages"]) == completion.messages
        assert row["reward"] == (0.5 if row["trajectory_id"] == "t" else None)


async def test_an_export_that_fails_leaves_what_was_there(
    database: Database, writer: Writer, captured: Captured, tmp_path: Path, monkeypatch
):
    await writer.store(captured(response=answer("fine")))
    path = tmp_path / "log.jsonl"
    before = exported(database, path)

    def fails(answer):
        raise OSError("the disk is full")

    monkeypatch.setattr(export, "_jsonl_line", fails)
    result = command(database, "export", path)
    assert result.exit_code == 1
    assert "the disk is full" in result.output
    assert [json.loads(line) for line in path.read_text().splitlines()] == before
    assert [p.name for p in tmp_path.glob("log*")] == ["log.jsonl"]


async def test_memory_does_not_grow_with_the_log(
    database: Database, writer: Writer, captured: Captured
):
    text = "x" * 20_000
    peaks = []
    for size in (200, 600):
        items = [captured(f"{size}-{n}", response=answer(f"{text}{n}")) for n in range(size)]
        await asyncio.gather(*map(writer.store, items))
        del items
        tracemalloc.start()
        assert sum(map(len, export.lines(database, ALL, "jsonl"))) > size * len(text)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


async def test_every_chat_is_exported_when_many_began_at_the_same_time(
    database: Database, writer: Writer, captured: Captured
):
    items = [captured(f"t{n}", response=answer(str(n))) for n in range(50)]
    await asyncio.gather(*map(writer.store, items))
    assert b"".join(export.lines(database, ALL, "openai")).count(b"\n") == 50
    assert export.count(database, ALL) == 50


def chat(text: str, **more) -> str:
    return json.dumps({"messages": [*ASK, {"role": "assistant", "content": text}], **more})


def test_a_log_is_imported_as_untrainable_and_only_once(database: Database, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    lines = [
        chat("one", created=1000, metadata={"user": "ada"}, reward=0.5, tools=tools),
        chat("two", model="gpt-4o"),
        "",
        chat("two", model="gpt-4o"),
    ]
    path.write_text("\n".join(lines) + "\n")
    result = command(database, "import", path)
    assert result.exit_code == 0, result.output
    assert "2 chats were imported, 1 were there already" in result.output
    result = command(database, "import", path)
    assert "0 chats were imported, 3 were there already" in result.output
    first, second = exported(database, tmp_path / "out.jsonl")
    assert [m["content"] for m in first["messages"]] == ["Hello.", "one"]
    assert (first["reward"], first["metadata"]) == (0.5, {"user": "ada"})
    assert (first["tools"], first["created"]) == (tools, 1000.0)
    assert (first["model"], second["model"]) == ("imported", "gpt-4o")
    assert first["strop"]["reason"] == "no_token_ids"
    result = command(database, "import", path, "--project", "elsewhere")
    assert "2 chats were imported" in result.output


def test_an_export_can_be_imported_again(database: Database, tmp_path: Path):
    (tmp_path / "a").write_text(chat("one", created=1000, reward=1) + "\n" + chat("two"))
    assert command(database, "import", tmp_path / "a").exit_code == 0
    first = exported(database, tmp_path / "b.jsonl")
    result = command(database, "import", tmp_path / "b.jsonl", "--project", "copy")
    assert result.exit_code == 0, result.output
    second = exported(database, tmp_path / "c.jsonl", "--project", "copy")
    kept = ("messages", "reward", "model", "created")
    assert [[x[k] for k in kept] for x in first] == [[x[k] for k in kept] for x in second]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "it is not JSON"),
        ("[]", "no JSON object"),
        ("{}", "`messages` must be a list"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "its answer"),
        ('{"messages": [{"role": "user"}, {"role": "user"}]}', "must be the answer"),
        ('{"messages": [{"role": "user"}, {"content": "x"}]}', "messages[1]"),
        (chat("x", reward="good"), "`reward`"),
        (chat("x", created="today"), "`created`"),
        (chat("x", created=-1), "`created`"),
        (chat("x", metadata=[]), "`metadata`"),
        (chat("x", tools={}), "`tools`"),
    ],
)
def test_a_line_that_is_no_chat_is_named(database: Database, line, problem):
    text = "\n".join([chat("one"), line, chat("three")])
    result = command(database, "import", "-", input=text)
    assert result.exit_code == 1
    output = " ".join(result.output.split())
    assert "Line 2:" in output
    assert problem in output
    result = command(database, "import", "-", "--skip-invalid", input=text)
    assert result.exit_code == 0
    assert "1 lines were passed over" in " ".join(result.output.split())


def test_files_that_cannot_be_used_are_said_so(database: Database, tmp_path: Path):
    for arguments in (
        ("import", tmp_path / "nothing"),
        ("export", tmp_path / "nowhere" / "log.jsonl"),
        ("export", "-", "--format", "parquet"),
    ):
        result = command(database, *arguments)
        assert result.exit_code == 1
        assert "Error:" in result.output


async def test_the_log_is_streamed_over_http(strop: Running):
    replies = [
        await strop.client.chat.completions.create(
            model="agent", messages=[{"role": "user", "content": str(n)}], max_tokens=4
        )
        for n in range(3)
    ]
    await strop.post("/v1/rewards", {"completion_id": replies[1].id, "reward": 1.0})
    for query, expected in (("", replies), ("&min_reward=0.5", replies[1:2])):
        async with strop.http.get(strop.url + f"/v1/export?format=openai{query}") as response:
            assert response.status == 200
            assert response.headers["content-type"] == "application/x-ndjson"
            lines = [json.loads(line) async for line in response.content]
        assert [line["messages"][-1]["content"] for line in lines] == [
            reply.choices[0].message.content for reply in expected
        ]
    async with strop.http.get(strop.url + "/v1/export") as response:
        lines = [json.loads(line) async for line in response.content]
    assert [line["strop"]["completion_id"] for line in lines] == [reply.id for reply in replies]
    status, body = await strop.get("/v1/export?format=csv")
    assert (status, body["error"]["param"]) == (422, "format")


async def test_parquet_over_http_holds_the_exact_tokens(strop: Running, monkeypatch):
    reply = await strop.client.chat.completions.create(model="agent", messages=ASK, max_tokens=4)
    await strop.post("/v1/rewards", {"completion_id": reply.id, "reward": 0.25})
    async with strop.http.get(strop.url + "/v1/export?format=parquet") as response:
        assert response.content_type == "application/vnd.apache.parquet"
        (row,) = pyarrow.parquet.read_table(io.BytesIO(await response.read())).to_pylist()
    with strop.gateway.database.read() as connection:
        stored = queries.completion(connection, "default", reply.id)
    assert row["completion_id"] == reply.id
    assert row["prompt_token_ids"] == stored.prompt_ids
    assert row["token_ids"] == stored.choices[0].token_ids
    assert row["reward"] == 0.25
    async with strop.http.get(strop.url + "/v1/export?format=parquet&policy=none") as response:
        assert pyarrow.parquet.read_table(io.BytesIO(await response.read())).num_rows == 0
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    status, body = await strop.get("/v1/export?format=parquet")
    assert (status, body["error"]["code"]) == (501, "not_installed")


async def test_a_log_is_imported_over_http_and_only_once(strop: Running):
    async def send(text: str, query: str = "") -> tuple[int, dict]:
        url = strop.url + "/v1/import" + query
        async with strop.http.post(url, data=text.encode()) as response:
            return response.status, await response.json()

    lines = [chat("one", created=1000, reward=0.5, metadata={"user": "ada"}), "", chat("two")]
    text = "\n".join(lines)
    status, body = await send(text)
    assert (status, body["error"]["code"]) == (400, "invalid_line")
    assert "Line 3: it names no time" in body["error"]["message"]
    status, body = await send("\n".join([lines[0], "{", lines[2]]), "?created=2000")
    assert (status, "Line 2: it is not JSON" in body["error"]["message"]) == (400, True)
    # All or nothing.
    assert (await strop.client.chat.completions.list()).data == []
    status, body = await send(text, "?created=2000&policy=old")
    assert (status, body["stored"], body["known"], body["skipped"]) == (200, 2, 0, 0)
    status, body = await send(text, "?created=2000&policy=old")
    assert (status, body["stored"], body["known"]) == (200, 0, 2)
    first, second = (await strop.client.chat.completions.list()).data
    assert (first.metadata, first.choices[0].message.content) == ({"user": "ada"}, "one")
    assert (second.model_extra["strop"]["policy"], second.created) == ("old", 2000)
    assert first.model_extra["strop"]["reason"] == "no_token_ids"
    status, body = await strop.get(f"/v1/rewards?completion_id={first.id}")
    assert [reward["reward"] for reward in body["data"]] == [0.5]
    status, body = await send("[]\n" + chat("three", created=1), "?skip_invalid=true")
    assert (status, body["stored"], body["skipped"]) == (200, 1, 1)
    assert body["problems"] == ["Line 1: it is no JSON object."]


async def test_what_is_old_is_deleted_over_http(strop: Running):
    for number in range(25):
        body = chat(str(number), created=1000 + number)
        async with strop.http.post(strop.url + "/v1/import", data=body) as response:
            assert response.status == 200
    reply = await strop.client.chat.completions.create(model="agent", messages=ASK, max_tokens=4)
    async with strop.http.delete(strop.url + "/v1/trajectories?before=2000") as response:
        body = await response.json()
    assert (response.status, body["trajectories"], body["completions"]) == (200, 25, 25)
    assert [found.id for found in (await strop.client.chat.completions.list()).data] == [reply.id]
    async with strop.http.delete(strop.url + "/v1/trajectories") as response:
        assert (response.status, (await response.json())["error"]["param"]) == (422, "before")
