"""When the toy calls tools and what with: enough of an agent to try real clients on.

After a user's message it calls the tools in their order, one a turn, and answers once it has had as
many results as there are tools. If the user says "together", it calls all of them in one turn.
Arguments, and answers that have to fit a schema, are made up from the schema.
"""

import json
import uuid
from typing import Any

from tests.toy_vllm.requests import ChatRequest


def calls_due(request: ChatRequest, choice: str | dict[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of this turn."""
    functions = [tool["function"] for tool in request.tools or []]
    if choice == "none" or not functions:
        return []
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        return [_call(next((f for f in functions if f["name"] == name), functions[0]))]
    results, together = 0, False
    for message in request.messages:
        if message.get("role") == "tool":
            results += 1
        elif message.get("role") == "user":
            results, together = 0, "together" in json.dumps(message.get("content"))
    if choice == "required":
        return [_call(functions[results % len(functions)])]
    if together:
        return [_call(function) for function in functions] if results == 0 else []
    return [_call(functions[results])] if results < len(functions) else []


def formatted(request: ChatRequest) -> str | None:
    """An answer that fits `response_format`; None if any text does."""
    wanted = request.response_format or {}
    if wanted.get("type") == "json_object":
        return json.dumps({"colour": "red"})
    if wanted.get("type") != "json_schema":
        return None
    schema = wanted["json_schema"]["schema"]
    return json.dumps(example(schema, schema))


def _call(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {}
    arguments = json.dumps(example({"type": "object", **schema}, schema))
    return {
        "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def example(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """The plainest value that fits a JSON schema; of objects only what is required."""
    while "$ref" in schema:
        found: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        schema = found
    if "const" in schema or "enum" in schema:
        return schema.get("const", next(iter(schema.get("enum", [None]))))
    for several in ("anyOf", "oneOf", "allOf"):
        if schema.get(several):
            return example(schema[several][0], root)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        fields = schema.get("properties", {})
        return {n: example(fields.get(n, {}), root) for n in schema.get("required", [])}
    if kind == "array":
        return [example(schema.get("items", {}), root)]
    return {"integer": 7, "number": 7.5, "boolean": True, "null": None}.get(kind, "red")
