"""A `/v1/messages` request → a chat request, and a chat answer → a message or its events.

LiteLLM translates both ways, streams included. Around it stands what it would get wrong for a
gateway that trains on what it logs: it drops what it does not know without a word, rewrites tool
call ids (the echo would not be recognised as a continuation), does not know vLLM's stop strings,
and names its messages itself.
"""

from collections.abc import AsyncIterator
from typing import Any

from gateway.api.ids import message_id
from gateway.capture.translate import (
    Json,
    Pushed,
    plain_message,
    plain_tool,
    with_reasoning_named,
)
from gateway.errors import ApiError, invalid

MODULE = "llms.anthropic.messages.adapters.transformation"
TYPES = "types.utils"

_BLOCKS = {
    "user": ("text", "image", "document", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_TRANSLATED_ELSEWHERE = frozenset(("model", "messages", "metadata", "thread"))
_IGNORED = (
    # Of Anthropic's servers: they change where or how fast an answer is made, not what it says.
    *("service_tier", "inference_geo", "speed", "betas", "cache_control", "container"),
    # Of LiteLLM: what it takes from a request for its own use.
    *("litellm_metadata", "drop_params", "custom_llm_provider", "thinking", "output_config"),
)
_UNSUPPORTED = ("mcp_servers", "context_management", "n")
_BILLING = "x-anthropic-billing-header"

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(error: ApiError) -> Json:
    """An error in Anthropic's format."""
    shown: Json = {"type": _ERRORS.get(error.status, "api_error"), "message": error.message}
    if error.code == "thread_not_found":
        # By which the SDK knows that it has to send the whole conversation again.
        shown["details"] = {"error_code": error.code}
    return {"type": "error", "error": shown}


def check(request: Json, *, counting: bool = False) -> None:
    """Refuse what cannot be translated; `counting`: there will be no answer.

    Raises:
        ApiError: naming the field.
    """
    for name in ("model", "messages", *(() if counting else ("max_tokens",))):
        if request.get(name) is None:
            raise invalid(f"{name}: Field required", name)
    for name in _UNSUPPORTED:
        if request.get(name):
            raise invalid(f"{name}: is not supported here", name)
    kinds = (("messages", list), ("tools", list), ("metadata", dict), ("tool_choice", dict))
    more = (("thinking", dict), ("stream", bool), ("stop_sequences", list), ("model", str))
    for name, kind in (*kinds, *more):
        if request.get(name) is not None and not isinstance(request[name], kind):
            raise invalid(f"{name}: has the wrong type", name)
    if not request["messages"]:
        raise invalid("messages: at least one message is required", "messages")
    for index, message in enumerate(request["messages"]):
        place = f"messages.{index}"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _BLOCKS:
            raise invalid(f"{place}.role: must be 'user' or 'assistant'", f"{place}.role")
        _check_content(message.get("content"), _BLOCKS[role], f"{place}.content")
    if request.get("system") is not None:
        _check_content(request["system"], _BLOCKS["system"], "system")
    choice = request.get("tool_choice") or {"type": "auto"}
    if choice.get("type") not in ("auto", "any", "none") and not (
        choice.get("type") == "tool" and isinstance(choice.get("name"), str)
    ):
        raise invalid("tool_choice: must be auto, any, none, or tool with a name", "tool_choice")
    for index, tool in enumerate(request.get("tools") or ()):
        _check_tool(tool, f"tools.{index}")
    _check_thread(request)


def _check_thread(request: Json) -> None:
    thread = request.get("thread")
    if thread is None:
        return
    kind = thread.get("type") if isinstance(thread, dict) else None
    if kind not in ("create", "continue"):
        raise invalid("thread.type: must be 'create' or 'continue'", "thread")
    if kind == "create":
        return
    if not isinstance(thread.get("previous_message_id"), str):
        raise invalid("thread.previous_message_id: must be a string", "thread")
    for name in ("system", "tools"):
        if request.get(name):
            raise invalid(f"{name}: a thread keeps those that it was created with", name)


def continued(request: Json) -> str | None:
    """The id of the message that a request continues in its thread."""
    thread = request.get("thread") or {}
    name: str | None = thread.get("previous_message_id")
    return name if thread.get("type") == "continue" else None


def _check_content(content: Any, known: tuple[str, ...], place: str) -> None:
    if not isinstance(content, str | list):
        raise invalid(f"{place}: must be a string or a list of blocks", place)
    for index, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        where = f"{place}.{index}"
        if not isinstance(kind, str) or kind not in known:
            choices = ", ".join(sorted(known))
            raise invalid(f"{where}.type: is {kind!r}; it must be one of {choices}", where)
        if kind == "text" and not isinstance(block.get("text"), str):
            raise invalid(f"{where}.text: must be a string", where)
        for name in {"tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}.get(kind, ()):
            if not isinstance(block.get(name), str):
                raise invalid(f"{where}.{name}: must be a string", where)


def _check_tool(tool: Any, place: str) -> None:
    if not isinstance(tool, dict):
        raise invalid(f"{place}: must be an object", place)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise invalid(
            f"{place}.type: {kind!r} is not supported. Anthropic's own tools run on its servers or "
            "were taught to its models; define a custom tool with an input_schema.",
            place,
        )
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{place}: a name and an input_schema are required", place)


def chat_request(module: Any, request: Json) -> tuple[Json, dict[str, str]]:
    """The chat request, and which tool names LiteLLM shortened: the short one → the client's.

    Raises:
        ApiError: the messages cannot be read.
    """
    given = {name: request[name] for name in request if name not in _TRANSLATED_ELSEWHERE}
    if isinstance(request.get("system"), list):
        given["system"] = [block for block in request["system"] if not _is_billing(block)]
    try:
        adapter = module.AnthropicAdapter()
        made, short_names = adapter.translate_completion_input_params_with_tool_mapping(
            # Not the policy's name, in which LiteLLM would look for a provider it knows.
            {**given, "model": "policy", "messages": request["messages"]},
            custom_llm_provider="hosted_vllm",
        )
    except Exception as error:
        raise invalid(f"messages: cannot be read: {error}", "messages") from error
    chat: Json = {name: value for name, value in made.items() if name not in _IGNORED}
    chat["model"] = request["model"]
    chat["messages"] = [plain_message(dict(message)) for message in made["messages"]]
    if not chat["messages"]:
        raise invalid("messages: all messages are empty", "messages")
    _mark_errors(request["messages"], chat["messages"])
    if "tools" in chat:
        chat["tools"] = [plain_tool(tool) for tool in chat["tools"]]
    if isinstance(chat.get("reasoning_effort"), dict):
        chat["reasoning_effort"] = chat["reasoning_effort"]["effort"]
    if (request.get("tool_choice") or {}).get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if chat["messages"][-1]["role"] == "assistant":
        # Anthropic's way of having an answer begin with given words.
        chat.update(add_generation_prompt=False, continue_final_message=True)
    if request.get("metadata"):
        chat["metadata"] = request["metadata"]
    if request.get("stream"):
        # In every chunk, so that the event which begins the message can count the prompt.
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return chat, short_names


def _mark_errors(given: list[Json], messages: list[Json]) -> None:
    """Keep in the log which tool results are errors; chat messages have no field for that."""
    failed = {
        block["tool_use_id"]
        for message in given
        if isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] == "tool_result" and block.get("is_error")
    }
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in failed:
            message["is_error"] = True
            # All that the model sees is the text.
            message["content"] = message.get("content") or "Error"


def _is_billing(block: Json) -> bool:
    # Claude Code puts a block with a checksum of the request in front of its system prompt. It
    # says nothing to the model, and as it differs in each turn no turn would continue another.
    return bool(block["text"].startswith(_BILLING))


class MessagesSurface:
    """One message; see `gateway.capture.translate.Surface`."""

    def __init__(self, module: Any, types: Any, short_names: dict[str, str]):
        self._module = module
        self._types = types
        self._short_names = short_names
        self._pushed: Pushed | None = None
        self._call_ids: list[str] = []
        """Those whose blocks have not been begun."""
        self._called = False
        self._stop: tuple[str | None, str | None] = (None, None)

    def answer(self, chat: Json) -> Json:
        """The message, not streamed."""
        choice = chat["choices"][0]
        calls = choice["message"].get("tool_calls") or []
        self._call_ids = [call["id"] for call in calls]
        message = self._module.AnthropicAdapter().translate_completion_output_params(
            self._types.ModelResponse(
                id=chat["id"],
                created=chat["created"],
                model=chat["model"],
                object="chat.completion",
                choices=[{**choice, "message": with_reasoning_named(choice["message"])}],
                usage=chat["usage"],
            ),
            self._short_names,
        )
        content = [self._block(block) for block in message["content"]]
        reason, sequence = _stop(choice, bool(calls))
        return {
            **message,
            "id": message_id(chat["id"]),
            # Anthropic refuses an empty text that is echoed, and never sends one.
            "content": [block for block in content if block.get("text") != ""],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(message["usage"]),
        }

    def error(self, error: ApiError) -> Json:
        """An error in Anthropic's format."""
        return error_body(error)

    def chunk(self, chunk: Json) -> list[Json]:
        """What LiteLLM makes of a chunk."""
        if self._pushed is None:
            first = {name: chunk.get(name) for name in ("id", "model", "usage")}
            self._pushed = Pushed(lambda chunks: self._events(first, chunks))
        if chunk.get("choices"):
            chunk.pop("usage", None)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            calls = delta.get("tool_calls") or ()
            self._called = self._called or bool(calls)
            self._call_ids += [call["id"] for call in calls if call.get("id")]
            if choice.get("finish_reason") is not None:
                self._stop = _stop(choice, self._called)
            choice["delta"] = with_reasoning_named(delta)
        return self._pushed.push(self._types.ModelResponseStream(**chunk))

    def end(self) -> list[Json]:
        """The end of the message."""
        return self._pushed.end() if self._pushed is not None else []

    def failed(self, error: ApiError) -> list[Json]:
        """The stream broke off."""
        return [self.error(error)]

    async def _events(self, first: Json, chunks: AsyncIterator[Any]) -> AsyncIterator[Json]:
        made = self._module.AnthropicStreamWrapper(
            completion_stream=chunks, model=first["model"], tool_name_mapping=self._short_names
        )
        async for event in made:
            if event["type"] == "message_start":
                message = {**event["message"], "id": message_id(first["id"])}
                if first["usage"]:
                    read = first["usage"]["prompt_tokens"]
                    message["usage"] = {**message["usage"], "input_tokens": read}
                event = {**event, "message": message}
            elif event["type"] == "content_block_start":
                event = {**event, "content_block": self._block(event["content_block"])}
            elif event["type"] == "message_delta":
                reason, sequence = self._stop
                delta = {**event["delta"], "stop_reason": reason, "stop_sequence": sequence}
                event = {**event, "delta": delta, "usage": _usage(event["usage"])}
            yield event

    def _block(self, block: Any) -> Json:
        """A content block; tool calls come in the order in which they were made."""
        shown: Json = dict(block)
        if shown["type"] == "tool_use":
            shown["id"] = self._call_ids.pop(0)
        if shown["type"] == "thinking":
            # vLLM signs nothing; clients expect the field.
            shown["signature"] = shown.get("signature") or ""
        return shown


def _stop(choice: Json, called: bool) -> tuple[str | None, str | None]:
    """Anthropic's stop reason and stop sequence.

    vLLM says `stop` for a stop string (which it then names) and for a tool call that was forced.
    """
    reason, matched = choice.get("finish_reason"), choice.get("stop_reason")
    if reason == "length":
        return "max_tokens", None
    if called:
        return "tool_use", None
    if isinstance(matched, str):
        return "stop_sequence", matched
    return "end_turn", None


def _usage(usage: Json) -> Json:
    return {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, **usage}
