"""Chat messages → items of OpenAI's Responses API, as it lists what a response was made from."""

from collections.abc import Collection, Iterator
from typing import Any

from gateway.capture.translate import Json


def items_of(messages: list[Any], prefix: str, custom: Collection[str] = ()) -> list[Json]:
    """The items that messages amount to, oldest first.

    Args:
        prefix: what the ids begin with; each ends in the number of its message.
        custom: names of the tools that are called with text instead of JSON.
    """
    found: list[Json] = []
    calls: set[str] = set()
    for number, message in enumerate(messages):
        name = f"{prefix}_{number}"
        role = message["role"]
        if role == "assistant":
            for item in _answer(message, name, custom):
                if item["type"] == "custom_tool_call":
                    calls.add(item["call_id"])
                found.append(item)
        elif role in ("tool", "function"):
            found.append(_output(message, name, calls))
        else:
            found.append(
                {
                    "id": f"msg_{name}",
                    "type": "message",
                    "role": role,
                    "status": "completed",
                    "content": _parts(message.get("content")),
                }
            )
    return found


def _answer(message: Json, name: str, custom: Collection[str]) -> Iterator[Json]:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        content = [{"type": "reasoning_text", "text": reasoning}]
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content}
    texts = [
        {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
        for part in _parts(message.get("content"))
        if part["type"] == "input_text"
    ]
    refusal = message.get("refusal")
    if refusal:
        texts.append({"type": "refusal", "refusal": refusal})
    if texts:
        yield {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": texts,
        }
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        shown = {"call_id": call.get("id") or "", "name": function.get("name") or ""}
        if shown["name"] in custom:
            kind, field = "custom_tool_call", "input"
        else:
            kind, field = "function_call", "arguments"
        begins = "ctc" if field == "input" else "fc"
        yield {
            "id": f"{begins}_{name}_{number}",
            "type": kind,
            "status": "completed",
            **shown,
            field: function.get("arguments") or "",
        }


def _output(message: Json, name: str, custom: Collection[str]) -> Json:
    call_id = message.get("tool_call_id") or ""
    content = message.get("content")
    kind = "custom_tool_call_output" if call_id in custom else "function_call_output"
    return {
        "id": f"{'ctco' if call_id in custom else 'fco'}_{name}",
        "type": kind,
        "call_id": call_id,
        "output": content if isinstance(content, str) else _parts(content),
        "status": "completed",
    }


def _parts(content: Any) -> list[Json]:
    if not isinstance(content, list):
        return [{"type": "input_text", "text": content}] if content else []
    return [_part(part) for part in content if isinstance(part, dict)]


def _part(part: Json) -> Json:
    kind = part.get("type")
    if kind == "image_url":
        image = part.get("image_url")
        image = image if isinstance(image, dict) else {"url": image}
        return {
            "type": "input_image",
            "image_url": image.get("url"),
            "file_id": None,
            "detail": image.get("detail") or "auto",
        }
    if kind == "file":
        return {"type": "input_file", **(part.get("file") or {})}
    if isinstance(part.get("text"), str):
        return {"type": "input_text", "text": part["text"]}
    return part
