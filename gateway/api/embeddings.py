"""`POST /v1/embeddings`: handed to a replica, and not logged: nothing in it was sampled."""

from typing import Any

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from gateway.api.endpoint import JsonEndpoint
from gateway.backends.vllm import Replica, error_message
from gateway.catalog import served_version
from gateway.errors import ApiError, invalid, json_response
from gateway.gateway import Gateway
from gateway.http import unless_hung_up

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
    failed: Replica | None = None
    for _ in range(2):
        replica, model = _choose(gateway, body["model"], failed)
        if replica is None:
            break
        try:
            async with replica.post(path, {**body, "model": model}, model) as response:
                raw = await response.read()
        except aiohttp.ClientConnectorError as error:
            replica.lost(str(error))
            gateway.publisher.poke()
            failed = replica
            continue
        except TimeoutError:
            raise ApiError(504, "vLLM did not answer in time. Send the request again.") from None
        except aiohttp.ClientError as error:
            raise ApiError(502, f"vLLM broke off: {error}. Send the request again.") from error
        if response.status >= 400:
            raise ApiError(response.status, error_message(raw), code="upstream_refused")
        try:
            answer: Json = orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise ApiError(502, "vLLM sent what is not JSON.", code="upstream_failed") from None
        return answer
    raise ApiError(
        503,
        "No vLLM replica answers. Try again in a few seconds; GET /readyz says what is missing.",
        retry_after=2,
    )


def _choose(gateway: Gateway, model: str, without: Replica | None) -> tuple[Replica | None, str]:
    """A replica, and the name that the model has there.

    A model that is no policy may still be served: an embedding model beside the base model.
    """
    served = [r for r in gateway.pool.healthy if model in r.models and r is not without]
    if served:
        return min(served, key=lambda replica: replica.in_flight), model
    policy, pinned = gateway.publisher.catalog.find(gateway.project, model)
    _, name = served_version(policy, pinned, None)
    return gateway.pool.choose(name, "", without), name
