"""What all surfaces do at their end: commit, and only then answer."""

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.types import Receive, Scope

from gateway.backends.asking import first_answer
from gateway.backends.vllm import Replica, UpstreamResponse
from gateway.capture import threads
from gateway.capture.placement import Placement
from gateway.capture.retries import Logged
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
    work: Coroutine[Any, Any, None],
    answers: Callable[[], Sequence[Logged | None]],
) -> None:
    """Answer a request; what is in the log and does not reach its client is kept for the retry.

    Args:
        answers: tells, after `work`, the answer to each part of the request; None where it has no
            whole one.

    Raises:
        ApiError: nothing was sent.
    """

    async def keep() -> None:
        await gateway.retries.keep(gateway.project, headers_of(scope), body, answers())

    try:
        delivered = await unless_hung_up(receive, work)
    except ApiError:
        await keep()
        raise
    if not delivered:
        await keep()


def answer_of(captured: CapturedCompletion) -> Logged | None:
    """The answer of a completion that has a whole one."""
    if captured.status != "complete" or not captured.response:
        return None
    trajectory_id = captured.trajectory.id
    return Logged(captured.response, trajectory_id, captured.policy, captured.version)


def identity(
    completion_id: str, trajectory_id: str, shown: str | None
) -> list[tuple[bytes, bytes]]:
    """The headers from which a client learns what it got without parsing the body.

    Args:
        shown: the version by the name that clients see, if it is one of a policy.
    """
    headers = [
        (b"x-strop-completion", completion_id.encode()),
        (b"x-strop-trajectory", trajectory_id.encode("latin-1", "replace")),
    ]
    if shown is not None:
        headers.append((b"x-strop-version", shown.encode("latin-1", "replace")))
    return headers


def identity_of_replay(answer: Logged) -> list[tuple[bytes, bytes]]:
    """The same for an answer that was logged before."""
    return [*identity(answer.response["id"], answer.trajectory_id, answer.shown), REPLAYED]


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
        # It is not to be given to a retry either.
        captured.response = None
        raise ApiError(429, f"{error}. Try again in a second.", retry_after=1) from None
    except Exception as error:
        log.exception("%s was not stored", captured.id)
        captured.response = None
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
