"""Events: streamed, resumed, kept apart by project, and posted to webhooks."""

import asyncio
import base64
import json
import os
import time
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from sqlalchemy import insert, select

from gateway import webhooks
from gateway.app import running
from gateway.settings import Settings
from gateway.store import events, keys, policies
from gateway.store.models import Event
from gateway.store.models import Webhook as WebhookRow
from gateway.webhook_settings import Webhook
from tests.gateway.conftest import MakeStrop, Running, serving
from tests.gateway.test_publisher import write_version

SECRET = "whsec_" + base64.b64encode(b"a secret of the receiver").decode()


def happen(strop: Running, kind: str, project: str = "default", policy: str = "agent") -> int:
    with strop.gateway.database.write() as connection:
        return connection.execute(
            insert(Event)
            .values(project=project, policy=policy, kind=kind, version=1, detail={}, at=time.time())
            .returning(Event.id)
        ).scalar_one()


class Listener:
    """A client of the stream."""

    def __init__(self, response: aiohttp.ClientResponse):
        self.response = response

    async def next(self) -> dict[str, Any]:
        """The next event that is no heartbeat."""
        fields: dict[str, str] = {}
        while True:
            line = (await asyncio.wait_for(self.response.content.readline(), 20)).decode().strip()
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                return {
                    **json.loads(fields["data"]),
                    "_id": fields["id"],
                    "_event": fields["event"],
                }


@asynccontextmanager
async def listening(strop: Running, path: str = "/v1/events", **headers: str):
    async with strop.http.get(strop.url + path, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Listener(response)


async def test_a_publication_and_a_rollback_are_told(strop: Running):
    async with listening(strop) as stream:
        write_version(strop, 1)
        await strop.gateway.publisher.reconcile()
        event = await stream.next()
        assert (event["type"], event["policy"], event["version"]) == ("published", "agent", 1)
        assert (event["_id"], event["_event"]) == (str(event["id"]), "published")
        await strop.post("/v1/policies/agent/rollback", {"version": 0})
        assert (await stream.next())["type"] == "rolled_back"


async def test_a_stream_goes_on_where_another_ended(strop: Running):
    ids = [happen(strop, f"k{n}") for n in range(5)]
    async with listening(strop, **{"Last-Event-ID": str(ids[1])}) as stream:
        assert [(await stream.next())["id"] for _ in ids[2:]] == ids[2:]
        ids.append(happen(strop, "later"))
        assert (await stream.next())["id"] == ids[-1]
    async with listening(strop, **{"Last-Event-ID": "0"}) as stream:
        assert [(await stream.next())["id"] for _ in ids] == ids
    async with listening(
        strop, "/v1/events?type=k3&type=later", **{"Last-Event-ID": "0"}
    ) as stream:
        assert [(await stream.next())["id"] for _ in range(2)] == [ids[3], ids[-1]]
    async with strop.http.get(
        strop.url + "/v1/events", headers={"Last-Event-ID": "yesterday"}
    ) as response:
        assert response.status == 400
        assert "send 0 for everything" in (await response.json())["error"]["message"]


async def test_projects_hear_nothing_of_each_other(strop: Running):
    with strop.gateway.database.write() as connection:
        _, secret = keys.create(connection, "ours", "", ["read"])
        _, rewards_only = keys.create(connection, "ours", "", ["reward"])
    happen(strop, "theirs", "theirs")
    ours = happen(strop, "ours", "ours")
    headers = {"authorization": f"Bearer {secret}", "Last-Event-ID": "0"}
    async with listening(strop, **headers) as stream:
        happen(strop, "theirs", "theirs")
        assert (await stream.next())["id"] == ours
        last = happen(strop, "ours", "ours")
        assert (await stream.next())["id"] == last
    refused = {"authorization": f"Bearer {rewards_only}"}
    async with strop.http.get(strop.url + "/v1/events", headers=refused) as response:
        assert response.status == 403


async def test_a_number_that_is_missing_is_waited_for(strop: Running):
    # On PostgreSQL the transaction with the smaller number may end later.
    database = strop.gateway.database
    with database.write() as connection:
        row = {"project": "default", "policy": "agent", "kind": "k", "version": 1, "detail": {}}
        connection.execute(insert(Event).values(id=1, at=time.time(), **row))
        connection.execute(insert(Event).values(id=3, at=time.time(), **row))
    with database.read() as connection:
        assert events.settled(connection, 0) == 1
        assert events.settled(connection, 2) == 3
    with database.write() as connection:
        connection.execute(insert(Event).values(id=2, at=time.time(), **row))
        # This one is old: whatever had the numbers before it was rolled back.
        connection.execute(insert(Event).values(id=9, at=time.time() - events.GAP_SECONDS, **row))
    with database.read() as connection:
        assert events.settled(connection, 0) == 9


async def test_a_stop_does_not_wait_for_those_who_listen(make_strop: MakeStrop, tmp_path):
    """The server is told by signal, as by Ctrl-C and by `docker stop`."""
    import signal
    import subprocess
    import sys

    from gateway.backends.launch import free_port

    port = free_port()
    env = {**os.environ, "STROP_DATA_DIR": str(tmp_path / "d"), "STROP_REPLICAS": "[]"}
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--factory",
        "gateway.app:serve",
        "--port",
        str(port),
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{port}"
            until = time.monotonic() + 60
            while True:
                try:
                    async with http.get(url + "/healthz") as response:
                        assert response.status == 200
                        break
                except aiohttp.ClientConnectionError:
                    assert time.monotonic() < until
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    await asyncio.sleep(0.1)
            async with http.get(url + "/v1/events") as response:
                await response.content.readline()
                process.send_signal(signal.SIGTERM)
                # It ends by itself, and does not break off.
                await asyncio.wait_for(response.content.read(), 20)
        assert await asyncio.to_thread(process.wait, 20) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
    text = (tmp_path / "log").read_text()
    assert "GET /v1/events 200" in text
    assert "Traceback" not in text


class Receiver:
    """Somebody's web server that takes webhooks, and may refuse some."""

    def __init__(self) -> None:
        self.refuse = 0
        self.got: list[dict[str, Any]] = []
        self.tries: list[str] = []
        self.came = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        message_id = request.headers["webhook-id"]
        timestamp = request.headers["webhook-timestamp"]
        expected = webhooks.signature(b"a secret of the receiver", message_id, int(timestamp), body)
        assert request.headers["webhook-signature"] == expected
        self.tries.append(message_id)
        if self.refuse > 0:
            self.refuse -= 1
            return web.Response(status=(500, 429, 302)[self.refuse % 3])
        self.got.append(json.loads(body))
        self.came.set()
        return web.Response(status=204)

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.got) < count:
                self.came.clear()
                await self.came.wait()


@asynccontextmanager
async def receiving():
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield receiver, f"http://127.0.0.1:{port}/hook"
    finally:
        await runner.cleanup()


async def test_webhooks_get_every_event_in_order_though_they_refuse_some(
    make_strop: MakeStrop, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    async with receiving() as (receiver, url):
        hook = {"url": url, "secret_env": "HOOK_SECRET", "retry_seconds": 0.01}
        async with make_strop(webhooks={"ops": hook}) as strop:
            await until_known(strop, "ops")
            receiver.refuse = 4
            ids = [happen(strop, "published"), happen(strop, "unasked"), happen(strop, "failed")]
            happen(strop, "published", project="theirs")
            with strop.gateway.database.write() as connection:
                policies.rolled_back(connection, "default", "agent", 0)
            await receiver.wait_for(3)
            kinds = [event["type"] for event in receiver.got]
            assert kinds == ["published", "failed", "rolled_back"]
            assert [event["id"] for event in receiver.got[:2]] == [ids[0], ids[2]]
            assert receiver.got[0]["project"] == "default"
            assert receiver.tries.count(f"evt_{ids[0]}") == 5


async def until_known(strop: Running, name: str) -> None:
    """Until the webhook has its place in the database."""
    async with asyncio.timeout(30):
        while True:
            with strop.gateway.database.read() as connection:
                query = select(WebhookRow.cursor).where(WebhookRow.id == name)
                if connection.execute(query).one_or_none() is not None:
                    return
            await asyncio.sleep(0.02)


async def test_a_restart_goes_on_where_it_was(
    make_strop: MakeStrop, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOOK_SECRET", "plain text")
    hook = {"url": "http://127.0.0.1:9/hook", "secret_env": "HOOK_SECRET", "retry_seconds": 0.01}
    async with make_strop(webhooks={"ops": hook}) as strop:
        await until_known(strop, "ops")
        number = happen(strop, "published")
        async with asyncio.timeout(30):
            while True:
                with strop.gateway.database.read() as connection:
                    row = connection.execute(select(WebhookRow.__table__)).mappings().one()
                if row["attempts"] >= 2:
                    break
                await asyncio.sleep(0.02)
        assert row["cursor"] == number - 1
        assert "ClientConnector" in row["error"]
        settings = strop.gateway.settings
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    async with receiving() as (receiver, url):
        moved = settings.webhooks["ops"].model_copy(update={"url": url})
        again = settings.model_copy(update={"webhooks": {"ops": moved}})
        async with serving(again):
            await receiver.wait_for(1)
    assert [event["id"] for event in receiver.got] == [number]


def test_a_signature_is_that_of_standard_webhooks():
    # The example of the specification's own libraries.
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    signed = webhooks.signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_a_webhook_without_its_secret_is_refused_in_words(tmp_path, toy_base):
    hook = Webhook(url="http://localhost/hook", secret_env="NO_SUCH_VARIABLE")
    settings = Settings(data_dir=tmp_path / "d", base_model=str(toy_base), webhooks={"ops": hook})
    with pytest.raises(ValueError, match="NO_SUCH_VARIABLE, which is not set"):
        async with running(settings):
            pass
