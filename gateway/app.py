"""Builds the application. The only place where the parts meet."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from fastapi import FastAPI
from starlette.routing import Route

from gateway import __version__, errors
from gateway.api import completions, groups, health, models, policies, rewards, trajectories
from gateway.api.chat import ChatCompletions
from gateway.backends.vllm import ReplicaPool
from gateway.capture.placement import Placements
from gateway.capture.retries import Retries
from gateway.dashboard import pages
from gateway.gateway import Gateway
from gateway.publisher import Publisher
from gateway.settings import Settings
from gateway.store import Database
from gateway.store.models import DEFAULT_PROJECT
from gateway.store.writer import Writer

# Below the 5 seconds after which vLLM's server closes an idle connection, so that no request is
# sent on one that is being closed.
_IDLE_SECONDS = 3.0


def build(settings: Settings | None = None) -> FastAPI:
    """The gateway as an ASGI application; it starts its parts when it is started."""
    settings = settings or Settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings) as gateway:
            app.state.gateway = gateway
            yield

    app = FastAPI(
        title="strop",
        version=__version__,
        summary="A drop-in OpenAI API gateway that makes the model behind it better at its job.",
        lifespan=lifespan,
    )
    errors.install(app)
    chat = ChatCompletions()
    for path in ("/v1/chat/completions", "/rollouts/{group}/{trajectory}/v1/chat/completions"):
        app.router.routes.append(Route(path, chat, methods=["POST"]))
    for module in (rewards, completions, trajectories, groups, policies, models, health, pages):
        app.include_router(module.router)
    return app


def serve() -> FastAPI:
    """What `uvicorn --factory gateway.app:serve` builds."""
    return build()


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Gateway]:
    """The parts, started, and stopped in the opposite order."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    database = Database(settings.url())
    await asyncio.to_thread(database.migrate)
    writer = Writer(database, settings.commit_batch, settings.commit_queue)
    writer.start()
    timeout = aiohttp.ClientTimeout(
        total=None,
        sock_connect=settings.connect_timeout,
        sock_read=settings.upstream_timeout,
    )
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        pool = ReplicaPool(settings.replicas, session)
        publisher = Publisher(
            database,
            writer,
            pool,
            project=DEFAULT_PROJECT,
            poll=settings.publish_poll,
            keep_loaded=settings.keep_loaded,
            tolerance=settings.probe_tolerance,
        )
        gateway = Gateway(
            settings, database, writer, pool, publisher, Placements(database), Retries()
        )
        try:
            await _configure_policies(gateway)
            publishing = asyncio.create_task(publisher.run())
            try:
                yield gateway
            finally:
                publishing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await publishing
        finally:
            await writer.close()
            database.dispose()


async def _configure_policies(gateway: Gateway) -> None:
    """Make the policies of the settings, or bring those that there are up to date with them."""
    settings = gateway.settings
    for name, config in settings.policy_configs().items():
        if await policies.ensure_policy(gateway, name, config.lora, config.settings()):
            continue
        await policies.check_base(gateway, name)
        if name in settings.policies:
            await policies.reconfigure(gateway, name, config.settings())
