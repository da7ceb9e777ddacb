"""How a request finds a replica, and another one, once, where the first fails before it answers."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

import aiohttp

from gateway.backends.vllm import Json, Replica, UpstreamResponse

T = TypeVar("T")

Choose = Callable[[Replica | None], tuple[Replica | None, str]]
"""A replica other than the one given, and the name that the model has there."""

_BY_VERSION = ("/v1/chat/completions", "/v1/completions")
"""What every vLLM has, so that a 404 says that the version is not there. Of others, embeddings say,
it may say that this vLLM does not have them at all."""


async def first_answer(
    path: str,
    body: Json,
    choose: Choose,
    take: Callable[[Replica, UpstreamResponse, AsyncExitStack], Awaitable[T]],
    asked: Callable[[Replica], None],
    poke: Callable[[], None],
) -> T | None:
    """What `take` makes of the answer; None: no replica takes the request.

    The request goes to another replica, once and if there is one, where the first does not answer,
    answers with its own failure, or does not have the model. All but the last counts for ejection.

    Args:
        body: `model` is filled in.
        take: gets the replica, its response, and the stack that the response is closed with. What
            breaks in it has not been answered either.
        asked: called with a replica before it is asked.
        poke: called when a replica turns out to be gone, or to have lost a version.

    Raises:
        aiohttp.ClientError, TimeoutError: the replica that was asked last broke off, or did not
            answer in time. The caller counts that for its ejection, as it does what breaks later.
    """
    failed: Replica | None = None
    for last in (False, True):
        replica, model = choose(failed)
        if replica is None:
            break
        asked(replica)
        alone = last or choose(replica)[0] is None
        try:
            async with AsyncExitStack() as opened:
                response = await opened.enter_async_context(
                    replica.post(path, {**body, "model": model}, model)
                )
                missing = response.status == 404
                if missing and path in _BY_VERSION:
                    # It was started anew, and has not got the version back yet.
                    replica.proven -= {model}
                    poke()
                elif response.status >= 500:
                    replica.ejection.failed(f"it answered with {response.status}")
                if alone or not (missing or response.status >= 500):
                    return await take(replica, response, opened)
        except aiohttp.ClientConnectorError as error:
            replica.lost(str(error))
            poke()
        except (aiohttp.ClientError, TimeoutError) as error:
            if alone:
                raise
            replica.ejection.failed(str(error) or type(error).__name__)
        failed = replica
    return None


async def ask(
    path: str, body: Json, choose: Choose, poke: Callable[[], None]
) -> tuple[int, bytes] | None:
    """Status and whole body of a replica's answer, of which nothing is logged.

    Embeddings, token counts, what a judge is asked. Arguments and None as for `first_answer`.

    Raises:
        aiohttp.ClientError, TimeoutError: it broke off, or did not answer in time.
    """
    replicas: list[Replica] = []

    async def take(
        replica: Replica, response: UpstreamResponse, _: AsyncExitStack
    ) -> tuple[int, bytes]:
        raw = await response.read()
        if response.status < 500:
            replica.ejection.succeeded()
        return response.status, raw

    try:
        return await first_answer(path, body, choose, take, replicas.append, poke)
    except (aiohttp.ClientError, TimeoutError) as error:
        replicas[-1].ejection.failed(str(error) or type(error).__name__)
        raise
