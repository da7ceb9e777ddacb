"""A chat request as the client sent it → what is sent to vLLM, and what the client may see."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import invalid

Json = dict[str, Any]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

NEUTRAL_SAMPLING: Json = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling that leaves the model's own distribution as it is. It is sent in full, because vLLM
else takes what the model's `generation_config.json` recommends."""

_STRIPPED = ("metadata", "store", "instructions", "strop")
"""Fields for strop; vLLM does not know them. Under `strop` a surface keeps what it needs later."""


@dataclass(slots=True, frozen=True)
class Wants:
    """What the client asked to see."""

    logprobs: bool
    token_ids: bool
    stream: bool
    usage: bool
    """`stream_options.include_usage`."""


def parse_body(raw: bytes) -> Json:
    """The body as a JSON object.

    Raises:
        ApiError: it is not one.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.")
    return body


def check_chat(body: Json, most: int) -> None:
    """Refuse what OpenAI's API refuses; everything else is vLLM's to judge.

    Args:
        most: the largest `n`.

    Raises:
        ApiError: naming the field.
    """
    model = body.get("model")
    if model is None:
        raise invalid("You must name a model: set `model`.", "model", "missing_required_parameter")
    _type(model, str, "model", "a string")
    messages = body.get("messages")
    if messages is None:
        raise invalid("`messages` is required.", "messages", "missing_required_parameter")
    _type(messages, list, "messages", "a list")
    if not messages:
        raise invalid("`messages` must not be empty.", "messages", "empty_array")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        _type(message, dict, place, "an object")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid(
                f"{place}.role is {role!r}; it must be one of {', '.join(sorted(_ROLES))}.",
                f"{place}.role",
                "invalid_value",
            )
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise invalid(f"{place}.content must be a string or a list.", f"{place}.content")
        if content is None and role in ("system", "developer", "user", "tool"):
            raise invalid(f"{place}.content is required for the role {role}.", f"{place}.content")
    for name in ("n", "max_tokens", "max_completion_tokens"):
        _positive(body, name)
    check_choices(body, most)
    for name in ("stream", "logprobs", "store", "return_token_ids"):
        if body.get(name) is not None:
            _type(body[name], bool, name, "true or false")
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p"):
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise invalid(f"`{name}` must be a number.", name, "invalid_type")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise invalid(
            "`top_logprobs` needs `logprobs` to be true.", "top_logprobs", "invalid_value"
        )
    for name in ("metadata", "stream_options"):
        if body.get(name) is not None:
            _type(body[name], dict, name, "an object")


def wants_of(body: Json) -> Wants:
    """What the client asked to see of the response."""
    return Wants(
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
        stream=bool(body.get("stream")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def sampling_of(body: Json, defaults: Mapping[str, Any]) -> tuple[Json, bool]:
    """The sampling parameters that will be in force, and whether they bias what is learnt.

    `defaults` are the policy's; what the request sets itself wins, and is listed under `asked`.

    The distribution at a temperature above 0 is known exactly (vLLM reports logprobs after the
    temperature); anything that cuts it off or bends it token by token is not what the trainer's
    model computes.
    """
    sampling: Json = {
        name: body[name] if body.get(name) is not None else defaults.get(name, neutral)
        for name, neutral in NEUTRAL_SAMPLING.items()
    }
    asked = [name for name in NEUTRAL_SAMPLING if body.get(name) is not None]
    if asked:
        sampling["asked"] = asked
    biased = (
        any(
            sampling[name] != neutral
            for name, neutral in NEUTRAL_SAMPLING.items()
            if name not in ("temperature", "top_k")
        )
        or sampling["temperature"] <= 0
        or sampling["top_k"] not in (-1, 0)
    )
    for name in ("logit_bias", "bad_words", "min_tokens", "structured_outputs", "use_beam_search"):
        if body.get(name):
            sampling[name] = body[name]
            biased = True
    shape = body.get("response_format") or {}
    _type(shape, dict, "response_format", "an object")
    if shape.get("type", "text") != "text":
        sampling["response_format"] = shape["type"]
        biased = True
    choice = body.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        sampling["tool_choice"] = "required"
        biased = True
    if body.get("seed") is not None:
        sampling["seed"] = body["seed"]
    return sampling, biased


def upstream_body(
    body: Json, served_model: str, sampling: Json, defaults: Mapping[str, Any]
) -> Json:
    """The request for vLLM: tokens and logprobs on, sampling spelt out, strop's fields off."""
    upstream = {name: value for name, value in body.items() if name not in _STRIPPED}
    limit = defaults.get("max_tokens")
    if limit and body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        upstream["max_tokens"] = limit
    upstream.update(
        {name: sampling[name] for name in NEUTRAL_SAMPLING},
        model=served_model,
        return_token_ids=True,
        logprobs=True,
        # null can make vLLM return no logprobs at all.
        top_logprobs=body.get("top_logprobs") or 0,
    )
    if upstream.get("stream"):
        upstream["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return upstream


def is_multimodal(messages: list[Any]) -> bool:
    """Whether any message holds something other than text."""
    return any(
        isinstance(part, dict) and part.get("type") not in ("text", "refusal")
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def _type(value: Any, kind: type, name: str, words: str) -> None:
    if not isinstance(value, kind):
        raise invalid(f"`{name}` must be {words}.", name, "invalid_type")


def check_choices(body: Json, most: int) -> None:
    """Refuse more choices than this gateway takes (`max_choices`).

    Raises:
        ApiError: 400.
    """
    n = body.get("n")
    if n is not None and n > most:
        raise invalid(
            f"`n` is {n}; this gateway takes at most {most} choices in one request (max_choices). "
            "Ask for the rest in further requests: with one X-Strop-Group they are one group.",
            "n",
            "integer_above_max_value",
        )


def _positive(body: Json, name: str) -> None:
    value = body.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"`{name}` must be a whole number.", name, "invalid_type")
    if value < 1:
        raise invalid(
            f"`{name}` is {value}; it must be at least 1.", name, "integer_below_min_value"
        )
