"""What all surfaces do at their end: commit, and only then answer."""

import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from starlette.types import Receive, Scope

from gateway.backends.asking import first_answer
from gateway.backends.vllm import Replica, UpstreamResponse
from gateway.capture import threads
from gateway.capture.placement import Placement
from gateway.capture.tokens import Capture
from gateway.errors import ApiError
from gateway.gateway import Gateway
from gateway.http import headers_of, unless_hung_up
from gateway.store.records import CapturedCompletion
from gateway.store.writer import QueueFull
from gateway.telemetry.observation import storing

log = logging.getLogger("strop.chat")

JSON = (b"content-type", b"application/json")
REPLAYED = (b"x-strop-replayed", b"true")
"""An answer was logged before, and is given to the client that lost it."""
NO_REPLICA = (
    "No vLLM replica answers. Try again in a few seconds; GET /readyz says what is missing."
)
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


async def open_upstream(
    gateway: Gateway,
    captured: CapturedCompletion,
    served_name: str,
    path: str,
    body: dict[str, Any],
    stack: AsyncExitStack,
) -> UpstreamResponse | None:
    """Send a request to a replica; where that fails before its answer begins, to another, once.

    None: none takes it. The response is closed with `stack`, which makes vLLM abort what it has
    not answered yet.

    Raises:
        aiohttp.ClientError, TimeoutError: it broke off, or did not answer in time.
    """
    pool, trajectory = gateway.pool, captured.trajectory.id

    def choose(without: Replica | None) -> tuple[Replica | None, str]:
        return pool.choose(served_name, trajectory, without), served_name

    def asked(replica: Replica) -> None:
        captured.replica = replica.url

    async def take(
        _: Replica, response: UpstreamResponse, opened: AsyncExitStack
    ) -> UpstreamResponse:
        stack.push_async_exit(opened.pop_all())
        return response

    return await first_answer(path, body, choose, take, asked, gateway.publisher.poke)


async def deliver(
    gateway: Gateway,
    scope: Scope,
    receive: Receive,
    body: dict[str, Any],
    captured: CapturedCompletion,
    work: Coroutine[Any, Any, None],
) -> None:
    """Answer a request; what is whole and does not reach its client is kept for the retry."""
    delivered = await unless_hung_up(receive, work)
    if not delivered and captured.status == "complete" and captured.response:
        await gateway.retries.keep(
            gateway.project, headers_of(scope), body, captured.id, captured.response
        )


def take_tokens(captured: CapturedCompletion, capture: Capture) -> None:
    """Take over what has come so far: who answered, the tokens, and their number."""
    captured.served_model = capture.served_model
    captured.prompt_ids = capture.prompt_ids
    captured.choices = [capture.choices[index] for index in sorted(capture.choices)]
    if capture.usage is not None:
        captured.prompt_tokens = capture.usage.get("prompt_tokens")
        captured.completion_tokens = capture.usage.get("completion_tokens")
    captured.finished_at = time.time()


def leave_keys(capture: Capture, placement: Placement) -> None:
    """Give each choice the key by which a request that continues it is recognised."""
    for index, choice in capture.choices.items():
        answer = {"role": "assistant", **capture.messages[index]}
        choice.thread_key = threads.extend(placement.digest, answer)


async def store(gateway: Gateway, captured: CapturedCompletion) -> None:
    """Commit a completion, and remember what the next turn may continue.

    Raises:
        ApiError: it is not in the database, and must not be answered.
    """
    captured.finished_at = captured.finished_at or time.time()
    seen = storing(captured)
    try:
        tails = await gateway.writer.store(captured)
    except QueueFull as error:
        raise ApiError(429, f"{error}. Try again in a second.", retry_after=1) from None
    except Exception as error:
        log.exception("%s was not stored", captured.id)
        raise ApiError(
            500,
            f"The completion could not be logged ({type(error).__name__}), so it is not served. "
            "strop's log says more.",
            code="not_logged",
        ) from error
    if seen is not None:
        seen.committed = time.time()
    if captured.status == "complete":
        gateway.pool.answered(captured.replica)
    gateway.placements.threads.add(captured.project, tails)
