"""Other providers, through LiteLLM: for comparison runs, and for answers to learn from later.

What they answer is logged without tokens, so it is never trained on, and with what it cost.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gateway.errors import ApiError

Json = dict[str, Any]

_OURS = ("model", "metadata", "store", "instructions", "strop")


class Provider(BaseModel):
    """A model of another provider: `[providers."gpt-5"]`."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """LiteLLM's name, such as `openai/gpt-5` or `anthropic/claude-sonnet-4-5`."""

    api_key_env: str | None = None
    """Environment variable that holds the provider's key; None: the one LiteLLM looks for."""

    api_base: str | None = None
    """Address, where it is not the provider's own."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `litellm.acompletion`."""


class ProviderError(Exception):
    """The provider, or LiteLLM, refused."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
        self.message = message

    def as_api_error(self) -> ApiError:
        """The same for the client."""
        return ApiError(self.status, self.message, code="provider_error")


async def _litellm() -> Any:
    # Takes seconds to import, and fetches a price list unless told not to.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return await asyncio.to_thread(__import__, "litellm")


def _arguments(provider: Provider, body: Json) -> Json:
    arguments = {name: value for name, value in body.items() if name not in _OURS}
    arguments.update(provider.options, model=provider.model)
    if provider.api_base is not None:
        arguments["api_base"] = provider.api_base
    if provider.api_key_env is not None:
        key = os.environ.get(provider.api_key_env)
        if not key:
            raise ProviderError(
                500, f"the environment variable {provider.api_key_env} of the gateway is not set"
            )
        arguments["api_key"] = key
    if body.get("stream"):
        arguments["stream_options"] = {"include_usage": True}
    return arguments


async def complete(provider: Provider, body: Json) -> Json:
    """A whole answer in OpenAI's form, its cost in dollars under `usage.cost` where known.

    Raises:
        ProviderError: with the provider's status and message.
    """
    litellm = await _litellm()
    try:
        response = await litellm.acompletion(**_arguments(provider, body))
    except Exception as error:
        raise _mapped(error) from error
    answer: Json = response.model_dump(mode="json")
    _add_cost(litellm, provider, answer)
    return answer


async def stream(provider: Provider, body: Json) -> AsyncIterator[Json]:
    """The chunks of an answer, usage in the last.

    Raises:
        ProviderError: with the provider's status and message, also in the middle.
    """
    litellm = await _litellm()
    try:
        async for chunk in await litellm.acompletion(**_arguments(provider, body)):
            found: Json = chunk.model_dump(mode="json", exclude_unset=True)
            _add_cost(litellm, provider, found)
            yield found
    except ProviderError:
        raise
    except Exception as error:
        raise _mapped(error) from error


def _add_cost(litellm: Any, provider: Provider, answer: Json) -> None:
    usage = answer.get("usage")
    if not usage:
        return
    try:
        prompt, completion = litellm.cost_per_token(
            model=provider.model,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
        )
    except Exception:
        # A model that has no listed price.
        return
    usage["cost"] = prompt + completion


def _mapped(error: Exception) -> ProviderError:
    if isinstance(error, ProviderError):
        return error
    status = getattr(error, "status_code", None)
    message = str(getattr(error, "message", error))
    return ProviderError(status if isinstance(status, int) and status >= 400 else 502, message)
