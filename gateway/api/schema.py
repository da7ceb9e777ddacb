"""The raw routes of the hot path in the OpenAPI description; FastAPI knows only its own."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.api import bodies

_ROLLOUT = "/rollouts/{group}/{trajectory}"
_PARAMETERS = [
    {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string", "maxLength": 256},
        "description": f"The {name} that the completion belongs to",
    }
    for name in ("group", "trajectory")
]


_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_ERRORS = {
    "4XX": {"description": "What is wrong with the request, and what to do", "content": _ERROR},
    "5XX": {"description": "What went wrong behind it", "content": _ERROR},
}


def describe(app: FastAPI, surfaces: Mapping[str, str]) -> None:
    """Add raw POST routes to what `/openapi.json` and `/docs` show.

    Args:
        surfaces: path under `/v1/` → what it does, in one line.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes
            )
            for operations in schema["paths"].values():
                for operation in operations.values():
                    _with_errors(operation)
            for path, summary in surfaces.items():
                for prefix, parameters in (("", []), (_ROLLOUT, _PARAMETERS)):
                    place = schema["paths"].setdefault(f"{prefix}/v1/{path}", {})
                    place["post"] = _operation(path, summary, parameters)
            parts = schema.setdefault("components", {})
            parts.setdefault("schemas", {})["Error"] = bodies.ERROR
            parts["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            schema["security"] = [{"key": []}, {"x-api-key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    # FastAPI's own way to replace its description.
    app.openapi = openapi  # type: ignore[method-assign]


def _with_errors(operation: dict[str, Any]) -> None:
    """Errors as they are, in the place of those that FastAPI would send."""
    operation["responses"].pop("422", None)
    operation["responses"].update(_ERRORS)


def _operation(path: str, summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    name = path.replace("/", "_")
    asked = {"application/json": {"schema": bodies.REQUESTS[path]}}
    answer: dict[str, Any] = {"application/json": {"schema": bodies.ANSWERS[path]}}
    if "stream" in bodies.REQUESTS[path]["properties"]:
        answer["text/event-stream"] = {"schema": {}}
    return {
        "tags": ["inference"],
        "summary": summary,
        "operationId": f"{name}_rollout" if parameters else name,
        "parameters": parameters,
        "requestBody": {"required": True, "content": asked},
        "responses": {
            "200": {"description": "The answer, or a stream of its events", "content": answer},
            **_ERRORS,
        },
    }
