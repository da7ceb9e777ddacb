"""Requests of which nothing is logged: embeddings, token counts, what a judge is asked.

They count for a replica's ejection as completions do, and go to another one, once, where the first
does not answer or answers with its own failure.
"""

from collections.abc import Callable

import aiohttp

from gateway.backends.vllm import Json, Replica

Choose = Callable[[Replica | None], tuple[Replica | None, str]]
"""A replica other than the one given, and the name that the model has there."""


async def ask(
    path: str, body: Json, choose: Choose, poke: Callable[[], None]
) -> tuple[int, bytes] | None:
    """Status and body of a replica's answer; None: there is no replica to ask.

    Args:
        body: `model` is filled in.
        poke: called when a replica turns out to be gone.

    Raises:
        aiohttp.ClientError, TimeoutError: it broke off, or did not answer in time.
    """
    failed: Replica | None = None
    for last in (False, True):
        replica, model = choose(failed)
        if replica is None:
            return None
        alone = last or choose(replica)[0] is None
        try:
            async with replica.post(path, {**body, "model": model}, model) as response:
                raw = await response.read()
        except aiohttp.ClientConnectorError as error:
            replica.lost(str(error))
            poke()
            failed = replica
            continue
        except (aiohttp.ClientError, TimeoutError) as error:
            replica.ejection.failed(str(error) or type(error).__name__)
            if alone:
                raise
            failed = replica
            continue
        if response.status < 500:
            replica.ejection.succeeded()
            return response.status, raw
        replica.ejection.failed(f"it answered with {response.status}")
        if alone:
            return response.status, raw
        failed = replica
    return None
