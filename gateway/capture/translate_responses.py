"""A `/v1/responses` request → a chat request, and a chat answer → a response object.

LiteLLM translates messages, tools, output and usage. Around it stands what it would get wrong for
a gateway that trains on what it logs: it drops what it does not know without a word, remembers
tool calls of other requests, fills in fields that cost tokens, and echoes other defaults than
OpenAI's.
"""

from typing import Any

from gateway.api.ids import response_id
from gateway.capture.translate import (
    Json,
    plain_message,
    plain_tool,
    with_reasoning_named,
)
from gateway.errors import invalid

MODULE = "responses.litellm_completion_transformation.transformation"

_FIELDS = frozenset(
    [
        "background",
        "context_management",
        "conversation",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "model",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    ]
)
"""The fields of the Responses API. Any other is one of vLLM's own (`top_k`, `seed`), as in chat."""

_NOT_ECHOED = ("input", "model", "stream", "stream_options", "include")

_TRANSLATED = [
    "messages",
    "tools",
    "tool_choice",
    "temperature",
    "top_p",
    "user",
    "parallel_tool_calls",
    "max_tokens",
    "stream",
    "stream_options",
    "response_format",
    "reasoning_effort",
]
"""What is taken of the chat request that LiteLLM makes; the rest is for itself."""

_UNSUPPORTED = (
    *("background", "conversation", "prompt", "context_management"),
    *("messages", "n", "strop"),
)
# Tuples, in which anything that JSON can hold may be looked for.
_ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output"),
)
_PARTS = (
    *("input_text", "output_text", "text", "refusal", "input_image", "input_file", "input_audio"),
)
_TOOLS = ("function", "custom")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = ("reasoning.encrypted_content", _LOGPROBS)


def check(request: Json) -> None:
    """Refuse what cannot be translated.

    Raises:
        ApiError: naming the field.
    """
    given = request.get("input")
    if given is None:
        raise invalid("`input` is required.", "input", "missing_required_parameter")
    if not isinstance(given, str | list):
        raise invalid("`input` must be a string or a list of items.", "input", "invalid_type")
    if not given:
        raise invalid("`input` must not be empty.", "input", "empty_array")
    for index, item in enumerate(given if isinstance(given, list) else ()):
        _check_item(item, f"input[{index}]")
    for name in _UNSUPPORTED:
        if request.get(name):
            raise invalid(f"`{name}` is not supported here.", name, "unsupported_parameter")
    if request.get("truncation") not in (None, "disabled"):
        raise invalid(
            "`truncation` must be 'disabled': no input is dropped here without a word.",
            "truncation",
            "unsupported_value",
        )
    kinds = (("instructions", str), ("text", dict), ("reasoning", dict), ("metadata", dict))
    more = (("tools", list), ("previous_response_id", str), ("stream", bool), ("include", list))
    for name, kind in (*kinds, *more):
        if request.get(name) is not None and not isinstance(request[name], kind):
            raise invalid(f"`{name}` has the wrong type.", name, "invalid_type")
    for name in request.get("include") or ():
        if name not in _INCLUDABLE:
            raise invalid(f"{name!r} cannot be included.", "include", "unsupported_value")
    for name, least in (("max_output_tokens", 1), ("top_logprobs", 0)):
        value = request.get(name)
        wrong = isinstance(value, bool) or not isinstance(value, int) or value < least
        if value is not None and wrong:
            raise invalid(f"`{name}` must be a whole number of at least {least}.", name)
    _check_tools(request)


def _check_item(item: Any, place: str) -> None:
    if not isinstance(item, dict):
        raise invalid(f"{place} must be an object.", place, "invalid_type")
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "item_reference":
        if not isinstance(item.get("id"), str):
            raise invalid(f"{place}.id must be a string.", f"{place}.id")
        return
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise invalid(
            f"{place}.type is {kind!r}; it must be one of {', '.join(sorted(_ITEMS))}.",
            f"{place}.type",
            "unsupported_value",
        )
    if kind == "message":
        _check_content(item.get("content"), f"{place}.content")
    if kind.endswith("_call_output"):
        _check_content(item.get("output"), f"{place}.output")
    if kind.endswith(("_call", "_call_output")) and not isinstance(item.get("call_id"), str):
        raise invalid(f"{place}.call_id must be a string.", f"{place}.call_id")


def _check_content(content: Any, place: str) -> None:
    if not isinstance(content, str | list):
        raise invalid(f"{place} must be a string or a list.", place, "invalid_type")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _PARTS:
            field = f"{place}[{index}].type"
            raise invalid(
                f"{field} is {kind!r}; it must be one of {', '.join(sorted(_PARTS))}.",
                field,
                "unsupported_value",
            )
        if kind.endswith("text") and not isinstance(part.get("text"), str):
            raise invalid(f"{place}[{index}].text must be a string.", f"{place}[{index}].text")


def _check_tools(request: Json) -> None:
    for index, tool in enumerate(request.get("tools") or ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in _TOOLS:
            raise invalid(
                f"tools[{index}] is of the type {kind!r}. Only the types 'function' and 'custom' "
                "are supported: OpenAI's built-in tools run on OpenAI's servers.",
                f"tools[{index}].type",
                "unsupported_value",
            )
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise invalid(f"tools[{index}].name must be a string.", f"tools[{index}].name")
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") not in _TOOLS:
        raise invalid(
            f"`tool_choice` of the type {choice.get('type')!r} is not supported.",
            "tool_choice",
            "unsupported_value",
        )


def chat_request(module: Any, request: Json, history: list[Json]) -> Json:
    """The chat request; `history` are the messages before the request's own.

    Raises:
        ApiError: the input cannot be read.
    """
    # LiteLLM remembers the tool calls of all requests by their id, and puts one that it remembers
    # before a tool's output. What a request means must not depend on what others were answered.
    module.TOOL_CALLS_CACHE.flush_cache()
    reasoning = request.get("reasoning") or {}
    try:
        made = module.LiteLLMCompletionResponsesConfig
        made = made.transform_responses_api_request_to_chat_completion_request(
            # Not the policy's name, in which LiteLLM would look for a provider it knows.
            model="policy",
            custom_llm_provider="hosted_vllm",
            input=request["input"],
            responses_api_request={**request, "reasoning": {"effort": reasoning.get("effort")}},
            stream=bool(request.get("stream")),
        )
    except Exception as error:
        raise invalid(f"`input` cannot be read: {error}.", "input") from error
    chat: Json = {name: value for name, value in request.items() if name not in _FIELDS}
    chat.update({name: made[name] for name in _TRANSLATED if made.get(name) is not None})
    messages = [plain_message(dict(message)) for message in chat["messages"]]
    instructions = request.get("instructions")
    if instructions:
        # The next response in the chain leaves them out, so it must be able to tell them apart
        # from a system message in the input. vLLM ignores the field.
        chat["instructions"] = instructions
        chat["messages"] = [messages[0], *history, *messages[1:]]
    else:
        chat["messages"] = [*history, *messages]
    if "tools" in chat:
        chat["tools"] = [plain_tool(tool) for tool in chat["tools"]]
    chat["model"] = request.get("model")
    if wants_logprobs(request):
        chat.update(logprobs=True, top_logprobs=request.get("top_logprobs") or 0)
    # What the response echoes, for when it is asked for again.
    chat["strop"] = {
        "responses": {name: request[name] for name in request if name not in _NOT_ECHOED}
    }
    if request.get("metadata"):
        chat["metadata"] = request["metadata"]
    return chat


def wants_logprobs(request: Json) -> bool:
    """Whether the logprobs of the answer's text are to be shown."""
    return bool(request.get("top_logprobs")) or _LOGPROBS in (request.get("include") or ())


def shell(request: Json, stored_id: str, created: int, model: str) -> Json:
    """A response that has only begun: what it echoes, with OpenAI's defaults."""
    shown: Json = {
        "id": response_id(stored_id),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        # Accepted whatever it says: the log is what this gateway is for.
        "store": request.get("store", True),
    }
    for name in (
        *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user"),
        *("prompt_cache_key", "safety_identifier"),
    ):
        shown[name] = request.get(name)
    for name, default in (
        ("metadata", {}),
        ("parallel_tool_calls", True),
        ("temperature", 1.0),
        ("text", {"format": {"type": "text"}}),
        ("tool_choice", "auto"),
        ("tools", []),
        ("top_logprobs", 0),
        ("top_p", 1.0),
        ("truncation", "disabled"),
    ):
        shown[name] = request[name] if request.get(name) is not None else default
    reasoning = request.get("reasoning") or {}
    shown["reasoning"] = {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")}
    return shown


def response(module: Any, chat: Json, request: Json) -> Json:
    """The response object for a chat completion's body."""
    choice = chat["choices"][0]
    message = with_reasoning_named(choice["message"])
    made = module.LiteLLMCompletionResponsesConfig
    made = made.transform_chat_completion_response_to_responses_api_response(
        request_input="",
        responses_api_request={"tools": request.get("tools") or []},
        chat_completion_response=module.ModelResponse(
            id=chat["id"],
            created=chat["created"],
            model=chat["model"],
            object="chat.completion",
            choices=[{"index": 0, "message": message, "finish_reason": choice["finish_reason"]}],
            usage=chat["usage"],
        ),
    ).model_dump(mode="json")
    done = shell(request, chat["id"], chat["created"], chat["model"])
    done["status"] = made["status"]
    done["incomplete_details"] = made["incomplete_details"]
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    calls = 0
    for item in made["output"]:
        shown = _item(item, chat["id"], made["status"], calls)
        calls += shown["type"].endswith("_call")
        if shown["type"] != "message":
            done["output"].append(shown)
        elif shown["content"]:
            shown["content"][0].setdefault("logprobs", []).extend(logprobs)
            done["output"].append(shown)
    done["usage"] = _usage(made["usage"])
    return done


_ID_BEGINS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}


def item_id(kind: str, stored_id: str, number: int = 0) -> str:
    """The id of an output item: the same in a stream and in the response that ends it.

    Args:
        number: of tool calls, which there may be several of.
    """
    shown = response_id(stored_id).replace("resp", _ID_BEGINS[kind], 1)
    return f"{shown}_{number}" if kind.endswith("_call") else shown


def item_owner(name: str) -> str | None:
    """The id of the completion that an output item is a part of."""
    begins, _, rest = name.partition("_")
    return "chatcmpl-" + rest.partition("_")[0] if begins in _ID_BEGINS.values() else None


def _item(item: Json, stored_id: str, status: str, number: int) -> Json:
    kind = item["type"]
    shown = {"id": item_id(kind, stored_id, number), "type": kind}
    if kind == "reasoning":
        # LiteLLM calls the text of reasoning `output_text`, and leaves the summary out.
        texts = [{"type": "reasoning_text", "text": part["text"]} for part in item["content"]]
        return {**shown, "summary": [], "content": texts, "status": status}
    if kind == "message":
        content = [
            {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
            if part["type"] == "output_text"
            else {"type": "refusal", "refusal": part["refusal"]}
            for part in item["content"]
            # An answer of tool calls alone has no message.
            if part.get("text") or part.get("refusal")
        ]
        return {**shown, "role": "assistant", "status": status, "content": content}
    field = "input" if kind == "custom_tool_call" else "arguments"
    names = ("call_id", "name", field)
    return {**shown, **{name: item[name] for name in names}, "status": "completed"}


def _usage(usage: Json) -> Json:
    read = usage.get("input_tokens_details") or {}
    written = usage.get("output_tokens_details") or {}
    return {
        "input_tokens": usage["input_tokens"],
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens") or 0},
        "output_tokens": usage["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": written.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }
