"""`POST /v1/embeddings`: handed to a replica, and not logged: nothing in it was sampled."""

from typing import Any

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from gateway.api.delivery import NO_REPLICA
from gateway.api.endpoint import JsonEndpoint
from gateway.backends.asking import ask
from gateway.backends.vllm import Replica, error_message
from gateway.catalog import served_version, split_version
from gateway.errors import ApiError, invalid, json_response
from gateway.gateway import Gateway
from gateway.http import unless_hung_up
from gateway.naming import unless_new

Json = dict[str, Any]


class Embeddings(JsonEndpoint):
    """The endpoint."""

    async def answer(
        self, gateway: Gateway, body: Json, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request."""
        if not isinstance(body.get("model"), str):
            raise invalid("You must name a model: set `model`.", "model")
        if body.get("input") is None:
            raise invalid("`input` is required.", "input", "missing_required_parameter")

        async def work() -> None:
            answer = await forward(gateway, "/v1/embeddings", body)
            await json_response({**answer, "model": body["model"]})(scope, receive, send)

        await unless_hung_up(receive, work())


def prompt_of(chat: Json) -> Json:
    """What vLLM's tokeniser has to know of a chat request."""
    names = ("model", "messages", "tools", "chat_template_kwargs")
    return {name: chat[name] for name in names if name in chat}


async def forward(gateway: Gateway, path: str, body: Json) -> Json:
    """A replica's answer to a request of which nothing is logged.

    Raises:
        ApiError: no replica answers, or one answers with an error.
    """
    try:
        answered = await ask(
            path,
            body,
            lambda without: _choose(gateway, body["model"], without),
            gateway.publisher.poke,
        )
    except ApiError as error:
        raise await unless_new(gateway, body["model"], error) from None
    except TimeoutError:
        raise ApiError(504, "vLLM did not answer in time. Send the request again.") from None
    except aiohttp.ClientError as error:
        raise ApiError(502, f"vLLM broke off: {error}. Send the request again.") from error
    if answered is None:
        raise ApiError(503, NO_REPLICA, retry_after=2)
    status, raw = answered
    if status >= 400:
        raise ApiError(status, error_message(raw), code="upstream_refused")
    try:
        answer: Json = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise ApiError(502, "vLLM sent what is not JSON.", code="upstream_failed") from None
    return answer


def _choose(gateway: Gateway, model: str, without: Replica | None) -> tuple[Replica | None, str]:
    """A replica, and the name that the model has there.

    A model that is no policy may still be served: an embedding model beside the base model. What
    replicas serve as a version of a policy is its project's alone, and has its name in the catalog.
    """
    pool = gateway.pool
    whole = split_version(model)[1] is None
    served = [r for r in pool.healthy if whole and model in r.models]
    if served:
        return pool.least_busy((r for r in served if r.url not in pool.drained), without), model
    policy, pinned = gateway.publisher.catalog.find(gateway.project, model)
    _, name = served_version(policy, pinned, None)
    # Nothing of it is in any replica's cache: it is best where least is to be done.
    return pool.least_busy(pool.serving(name), without), name
