"""Builds the application. The only place where the parts meet."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway import __version__, errors, preload
from gateway.api import (
    completions,
    events,
    export,
    groups,
    health,
    life,
    messages,
    metrics,
    models,
    policies,
    replicas,
    retention,
    rewards,
    schema,
    steps,
    stored,
    stored_responses,
    trajectories,
    why,
)
from gateway.api.chat import ChatCompletions
from gateway.api.embeddings import Embeddings
from gateway.api.responses import InputTokens, Responses
from gateway.api.text import TextCompletions
from gateway.auth import Authentication, Authenticator
from gateway.backends.vllm import ReplicaPool
from gateway.backends.wire import IDLE_SECONDS
from gateway.capture.placement import Placements
from gateway.capture.retries import Retries
from gateway.dashboard import actions, pages
from gateway.events import EventHub
from gateway.front import Strop
from gateway.gateway import Gateway
from gateway.guard import Guard
from gateway.judge.asking import Asker
from gateway.judge.judging import Judging
from gateway.memory import settle_memory
from gateway.publisher import Publisher
from gateway.retention import keep_deleting
from gateway.settings import Settings
from gateway.store import Database
from gateway.store.journal import Journal
from gateway.store.writer import Writer
from gateway.telemetry import logs
from gateway.telemetry.telemetry import Telemetry
from gateway.tracing.process import Tracing
from gateway.webhooks import deliveries
from gateway.workers import Worker
from gateway.writing.by_load import WriterByLoad
from gateway.writing.shared import SharedWriter

_FIRST_LOOK_SECONDS = 3.0
"""Most that the start waits to know what the replicas serve; to load adapters takes longer."""

SURFACES: dict[str, tuple[ASGIApp, str]] = {
    "chat/completions": (ChatCompletions(), "OpenAI's chat completions"),
    "completions": (TextCompletions(), "OpenAI's text completions"),
    "responses": (Responses(), "OpenAI's responses"),
    "responses/input_tokens": (InputTokens(), "Count the tokens of a response's input"),
    "messages": (messages.Messages(messages.create), "Anthropic's messages"),
    "messages/count_tokens": (
        messages.Messages(messages.count_tokens),
        "Count the tokens of an Anthropic message",
    ),
    "embeddings": (Embeddings(), "Embeddings, passed through and not logged"),
}
"""The hot path, by its path under `/v1/`, and what each is."""


def build(settings: Settings | None = None) -> FastAPI:
    """The gateway as an ASGI application; it starts its parts when it is started."""
    settings = settings or Settings()
    telemetry = Telemetry(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with running(settings) as gateway:
            app.state.gateway = gateway
            gateway.writer.in_progress = lambda: app.in_flight
            app.state.authenticator = Authenticator(gateway.database, settings.admin_key)
            async with telemetry.running(gateway):
                yield

    app = Strop(
        title="strop",
        version=__version__,
        summary="A drop-in OpenAI API gateway that makes the model behind it better at its job.",
        lifespan=lifespan,
    )
    errors.install(app)
    app.state.telemetry, app.tell = telemetry, telemetry.tell
    app.most = settings.max_requests
    # `Strop` calls the same for its hot path, which passes no middleware.
    app.add_middleware(Authentication)
    for path, (surface, _) in SURFACES.items():
        for prefix in ("/v1", "/rollouts/{group}/{trajectory}/v1"):
            app.router.routes.append(Route(f"{prefix}/{path}", surface, methods=["POST"]))
    app.hot = {f"/v1/{path}": surface for path, (surface, _) in SURFACES.items()}
    schema.describe(app, {path: summary for path, (_, summary) in SURFACES.items()})
    for module in (
        rewards,
        replicas,
        retention,
        completions,
        stored,
        stored_responses,
        export,
        trajectories,
        groups,
        policies,
        life,
        steps,
        why,
        models,
        events,
        metrics,
        health,
        pages,
        actions,
    ):
        app.include_router(module.router)
    return app


def serve() -> FastAPI:
    """What `uvicorn --factory gateway.app:serve` builds."""
    settings = Settings()
    logs.configure(settings.log_format, settings.log_level)
    app = build(settings)
    settle_memory()
    return app


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Gateway]:
    """The parts, started, and stopped in the opposite order."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    worker = Worker(settings.data_dir, settings.workers)
    database = Database(settings.url())
    await asyncio.to_thread(_migrate, worker, database)
    writer = _writer(settings, worker, database)
    tracing = Tracing(settings.url(), settings.public_url(), settings.langfuse, worker.sends)
    writer.start()
    timeout = aiohttp.ClientTimeout(
        total=None,
        sock_connect=settings.connect_timeout,
        sock_read=settings.upstream_timeout,
    )
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        pool = ReplicaPool(settings.replicas, session, settings.replica_dns_seconds)
        publisher = Publisher(
            database,
            writer,
            pool,
            poll=settings.publish_poll,
            keep_loaded=settings.keep_loaded,
            tolerance=settings.probe_tolerance,
            publishes=worker.publishes,
        )
        hub = EventHub(database, settings.publish_poll)
        placements, retries = Placements(database), Retries(database, writer)
        gateway = Gateway(settings, database, writer, pool, publisher, placements, retries, hub)
        try:
            tracing.start()
            await _configure_policies(gateway, worker)
            guard = Guard(database, writer, publisher, settings.guard_poll)
            gateway.deliveries = deliveries(settings.webhooks, database, hub, session)
            parts = [part.run() for part in gateway.deliveries]
            parts += [publisher.run(), guard.run(), hub.run()]
            tasks = [asyncio.create_task(part) for part in parts]
            asker = Asker(settings.providers, publisher, pool)
            judging = Judging(
                database, writer, asker, traced=settings.langfuse.projects, poll=settings.judge_poll
            )
            tasks.append(asyncio.create_task(judging.run()))
            if settings.preload_litellm or settings.providers:
                tasks.append(asyncio.create_task(preload.litellm()))
            days, by_project = settings.retention_days, settings.project_retention_days
            deleting = keep_deleting(database, writer, days, by_project, worker.publishes)
            tasks.append(asyncio.create_task(deleting))
            try:
                # Who finds this process listening finds the policies in it.
                with suppress(TimeoutError):
                    await asyncio.wait_for(publisher.looked.wait(), _FIRST_LOOK_SECONDS)
                with hub.ending_with_the_process():
                    yield gateway
            finally:
                await hub.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*(delivery.close() for delivery in gateway.deliveries))
        finally:
            pool.close()
            await writer.close()
            await tracing.close()
            database.dispose()
            worker.close()


def _writer(settings: Settings, worker: Worker, database: Database) -> Writer:
    batch, limit = settings.commit_batch, settings.commit_queue
    days, traced = settings.journal_pending_days, settings.langfuse.projects
    # PostgreSQL takes the commits of several at a time.
    choose = settings.writer == "auto" and database.is_sqlite
    if settings.writer == "process" or choose:
        chosen = WriterByLoad if choose and worker.alone else SharedWriter
        return chosen(database, worker, batch, limit, days, traced)
    # On SQLite a journal would be lost and full together with the database.
    journal = None if database.is_sqlite else Journal(worker.journal)
    if journal is not None:
        worker.adopt(journal)
    return Writer(database, batch, limit, journal, days, traced)


def _migrate(worker: Worker, database: Database) -> None:
    with worker.in_turn():
        database.migrate()


async def _configure_policies(gateway: Gateway, worker: Worker) -> None:
    """Make the policies of the settings, or bring those that there are up to date with them."""
    settings = gateway.settings
    async with worker.in_turn_async():
        for name, config in settings.policy_configs().items():
            if await policies.ensure_policy(gateway, name, config.lora, config.settings()):
                continue
            await policies.check_base(gateway, name)
            if name in settings.policies:
                await policies.reconfigure(gateway, name, config.settings())
