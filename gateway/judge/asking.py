"""Asking a judge: a provider's model by LiteLLM, or a policy of strop's own on its replicas.

What a judge answers is no completion of the policy: it is not logged as one, and never trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import orjson

from gateway.backends import providers
from gateway.backends.asking import ask
from gateway.backends.providers import Provider, ProviderError
from gateway.backends.vllm import Replica, ReplicaPool, error_message
from gateway.catalog import served_version
from gateway.errors import ApiError
from gateway.publisher import Publisher
from gateway.store.records import Json


class NotNow(Exception):
    """The judge cannot be asked at the moment, or there is none of that name."""


@dataclass(slots=True, frozen=True)
class Answer:
    """What came back, and what it cost in US dollars."""

    body: Json
    cost: float


class Asker:
    """Finds the model of a name and asks it."""

    def __init__(self, configured: Mapping[str, Provider], publisher: Publisher, pool: ReplicaPool):
        self._providers = configured
        self._publisher = publisher
        self._pool = pool

    async def ask(self, project: str, body: Json) -> Answer:
        """A chat completion.

        Raises:
            NotNow: with the reason.
        """
        provider = self._providers.get(body["model"])
        if provider is None:
            return await self._ask_policy(project, body)
        try:
            answer = await providers.complete(provider, body)
        except ProviderError as error:
            raise NotNow(f"{body['model']}: {error.message}") from error
        cost = (answer.get("usage") or {}).get("cost") or 0.0
        return Answer(answer, float(cost))

    async def _ask_policy(self, project: str, body: Json) -> Answer:
        try:
            policy, pinned = self._publisher.catalog.find(project, body["model"])
            _, served = served_version(policy, pinned, None)
        except ApiError as error:
            raise NotNow(f"{body['model']} is neither a provider nor served: {error}") from error

        def choose(without: Replica | None) -> tuple[Replica | None, str]:
            return self._pool.choose(served, "judge", without), served

        try:
            answered = await ask("/v1/chat/completions", body, choose, self._publisher.poke)
            if answered is None:
                raise NotNow(f"no replica serves {served}")
            status, raw = answered
            if status >= 400:
                raise NotNow(f"{served} answered {status}: {error_message(raw)}")
            answer = orjson.loads(raw)
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            raise NotNow(f"{served}: {error}") from error
        return Answer(answer if isinstance(answer, dict) else {}, 0.0)
