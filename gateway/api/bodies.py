"""JSON schemas of what goes in and out of the raw routes, for the OpenAPI description.

They say what a client has to send and can rely on. Fields that are not named here are let through
to vLLM, and come back from it.
"""

from typing import Any

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_OBJECT: Json = {"type": "object"}
_METADATA: Json = {"type": ["object", "null"], "additionalProperties": {"type": "string"}}
_FLAG: Json = {"type": ["boolean", "null"]}


def _maybe(kind: str, **limits: Any) -> Json:
    return {"type": [kind, "null"], **limits}


def _list(items: Json, **limits: Any) -> Json:
    return {"type": "array", "items": items, **limits}


def _object(required: str, **fields: Json) -> Json:
    return {"type": "object", "required": required.split(), "properties": fields}


def _named(kind: str, required: str = "", **fields: Json) -> Json:
    return _object(f"type {required}", type={"const": kind}, **fields)


MODEL: Json = {
    "type": "string",
    "description": "A policy, or one of its versions as `policy@N`",
    "examples": ["agent"],
}
_SAMPLING: Json = {
    "temperature": _maybe("number", minimum=0, maximum=2),
    "top_p": _maybe("number", exclusiveMinimum=0, maximum=1),
    "stream": _FLAG,
    "metadata": _METADATA,
}
_CHOICES: Json = {
    "n": _maybe("integer", minimum=1, maximum=128),
    "max_tokens": _maybe("integer", minimum=1),
    "seed": _maybe("integer", minimum=0, maximum=2**31),
    "stop": {"anyOf": [_TEXT, _list(_TEXT, maxItems=4), {"type": "null"}]},
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "presence_penalty": _maybe("number", minimum=-2, maximum=2),
    "frequency_penalty": _maybe("number", minimum=-2, maximum=2),
}
_TEXT_PART = _named("text", "text", text=_TEXT)
_IMAGE_PART = _named("image_url", "image_url", image_url=_object("url", url=_TEXT))
_CONTENT: Json = {"anyOf": [_TEXT, _list({"anyOf": [_TEXT_PART, _IMAGE_PART]})]}
_CALL = _named(
    "function",
    "id function",
    id=_TEXT,
    function=_object("name arguments", name=_TEXT, arguments=_TEXT),
)
_MESSAGE: Json = {
    "anyOf": [
        _object(
            "role content",
            role={"enum": ["system", "developer", "user"]},
            content=_CONTENT,
            name=_TEXT,
        ),
        _object(
            "role",
            role={"const": "assistant"},
            content={"anyOf": [_TEXT, _list(_TEXT_PART), {"type": "null"}]},
            tool_calls=_list(_CALL),
        ),
        _object(
            "role content tool_call_id",
            role={"const": "tool"},
            content={"anyOf": [_TEXT, _list(_TEXT_PART)]},
            tool_call_id=_TEXT,
        ),
    ]
}
_NAME: Json = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_TOOL = _named(
    "function",
    "function",
    function=_object("name", name=_NAME, description=_TEXT, parameters=_OBJECT),
)
_CHOICE_OF_TOOL: Json = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        _named("function", "function", function=_object("name", name=_NAME)),
    ]
}
_BLOCK: Json = {
    "anyOf": [
        _named("text", "text", text=_TEXT),
        _named("tool_use", "id name input", id=_TEXT, name=_TEXT, input=_OBJECT),
        _named("tool_result", "tool_use_id", tool_use_id=_TEXT, content=_TEXT, is_error=_FLAG),
        _named("thinking", "thinking", thinking=_TEXT, signature=_TEXT),
    ]
}
_ITEM: Json = {
    "anyOf": [
        _object(
            "role content",
            role={"enum": ["system", "developer", "user", "assistant"]},
            content={
                "anyOf": [_TEXT, _list(_object("type text", type={"const": "input_text"}))],
            },
        ),
        _named("function_call", "call_id name arguments", call_id=_TEXT, arguments=_TEXT),
        _named("function_call_output", "call_id output", call_id=_TEXT, output=_TEXT),
        _named("reasoning", "summary", summary=_list(_OBJECT)),
        _named("item_reference", "id", id=_TEXT),
    ]
}
_MESSAGES_BODY: Json = {
    "model": MODEL,
    "messages": _list(
        _object(
            "role content",
            role={"enum": ["user", "assistant"]},
            content={"anyOf": [_TEXT, _list(_BLOCK)]},
        ),
        minItems=1,
    ),
    "system": {"anyOf": [_TEXT, _list(_named("text", "text", text=_TEXT))]},
    "tools": _list(_object("name input_schema", name=_NAME, input_schema=_OBJECT)),
    "thread": _object("type", type={"enum": ["create", "continue"]}, previous_message_id=_TEXT),
}
_RESPONSES_BODY: Json = {
    "model": MODEL,
    "input": {"anyOf": [_TEXT, _list(_ITEM, minItems=1)]},
    "instructions": _maybe("string"),
    "previous_response_id": _maybe("string"),
    "tools": _list(_named("function", "name", name=_NAME, parameters=_OBJECT)),
}

REQUESTS: dict[str, Json] = {
    "chat/completions": _object(
        "model messages",
        model=MODEL,
        messages=_list(_MESSAGE, minItems=1),
        tools=_list(_TOOL),
        tool_choice=_CHOICE_OF_TOOL,
        logprobs=_FLAG,
        top_logprobs=_maybe("integer", minimum=0, maximum=20),
        max_completion_tokens=_maybe("integer", minimum=1),
        response_format={"type": ["object", "null"]},
        **_SAMPLING,
        **_CHOICES,
    ),
    "completions": _object(
        "model prompt",
        model=MODEL,
        prompt={
            "anyOf": [
                _TEXT,
                _list(_COUNT, minItems=1),
                _list({"anyOf": [_TEXT, _list(_COUNT, minItems=1)]}, minItems=1),
            ]
        },
        echo=_FLAG,
        logprobs=_maybe("integer", minimum=0, maximum=20),
        **_SAMPLING,
        **_CHOICES,
    ),
    "responses": _object(
        "model input",
        **_RESPONSES_BODY,
        max_output_tokens=_maybe("integer", minimum=1),
        include={"anyOf": [_list(_TEXT), {"type": "null"}]},
        text={"type": ["object", "null"]},
        **_SAMPLING,
    ),
    "responses/input_tokens": _object("model input", **_RESPONSES_BODY),
    "messages": _object(
        "model messages max_tokens",
        **_MESSAGES_BODY,
        max_tokens={"type": "integer", "minimum": 1},
        stop_sequences=_list(_TEXT),
        **_SAMPLING,
    ),
    "messages/count_tokens": _object("model messages", **_MESSAGES_BODY),
    "embeddings": _object("model input", model=MODEL, input={"anyOf": [_TEXT, _list(_TEXT)]}),
}
"""What a surface takes, by its path under `/v1/`."""

CHAT: Json = _object(
    "messages",
    messages=_list(_MESSAGE, minItems=2),
    tools=_list(_TOOL),
    model=_TEXT,
    created={"type": "number", "minimum": 0},
    metadata=_METADATA,
    reward=_maybe("number"),
)
"""A line of an import; the last of its messages is the answer."""

_USAGE = _object(
    "prompt_tokens completion_tokens total_tokens",
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
)
ANSWERS: dict[str, Json] = {
    "chat/completions": _object(
        "id object created model choices usage",
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_COUNT,
        model=_TEXT,
        choices=_list(
            _object(
                "index message finish_reason",
                index=_COUNT,
                message=_object(
                    "role content",
                    role={"const": "assistant"},
                    content=_maybe("string"),
                    tool_calls={"anyOf": [_list(_CALL), {"type": "null"}]},
                ),
                finish_reason={"enum": ["stop", "length", "tool_calls", "content_filter"]},
            ),
            minItems=1,
        ),
        usage=_USAGE,
    ),
    "completions": _object(
        "id object created model choices usage",
        id=_TEXT,
        object={"const": "text_completion"},
        created=_COUNT,
        model=_TEXT,
        choices=_list(_object("index text finish_reason", index=_COUNT, text=_TEXT)),
        usage=_USAGE,
    ),
    "responses": _object(
        "id object created_at model status output usage",
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        model=_TEXT,
        status={"enum": ["completed", "incomplete"]},
        output=_list(_object("id type", id=_TEXT, type=_TEXT)),
        usage=_object("input_tokens output_tokens total_tokens", input_tokens=_COUNT),
    ),
    "responses/input_tokens": _object("input_tokens", input_tokens=_COUNT),
    "messages": _object(
        "id type role content model stop_reason stop_sequence usage",
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        content=_list(_object("type", type={"enum": ["text", "tool_use", "thinking"]})),
        model=_TEXT,
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=_maybe("string"),
        usage=_object("input_tokens output_tokens", input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "messages/count_tokens": _object("input_tokens", input_tokens=_COUNT),
    "embeddings": _object(
        "object data model",
        data=_list(_object("index embedding", index=_COUNT, embedding=_list({"type": "number"}))),
    ),
}
"""What a surface answers when it does not stream."""

ERROR = _object(
    "error",
    error=_object(
        "message type",
        message=_TEXT,
        type=_TEXT,
        param=_maybe("string"),
        code={"type": ["string", "integer", "null"]},
    ),
)
"""An error, in OpenAI's form; in Anthropic's it has a `type` beside it."""
