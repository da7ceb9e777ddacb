"""The raw routes of the hot path in the OpenAPI description; FastAPI knows only its own."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

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
            for path, summary in surfaces.items():
                for prefix, parameters in (("", []), (_ROLLOUT, _PARAMETERS)):
                    place = schema["paths"].setdefault(f"{prefix}/v1/{path}", {})
                    place["post"] = _operation(path, summary, parameters)
            app.openapi_schema = schema
        return app.openapi_schema

    # FastAPI's own way to replace its description.
    app.openapi = openapi  # type: ignore[method-assign]


def _operation(path: str, summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"application/json": {"schema": {"type": "object"}}}
    name = path.replace("/", "_")
    return {
        "tags": ["inference"],
        "summary": summary,
        "operationId": f"{name}_rollout" if parameters else name,
        "parameters": parameters,
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {
                "description": "The answer, or a stream of its events",
                "content": {**body, "text/event-stream": {"schema": {"type": "string"}}},
            },
            "4XX": {"description": "What is wrong with the request", "content": body},
            "5XX": {"description": "What went wrong behind it", "content": body},
        },
    }
