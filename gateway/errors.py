"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, OperationalError, StatementError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.store.database import NotStorable
from gateway.store.journal import connection_lost

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


NO_VALUE = (NotStorable, OverflowError, UnicodeError)
"""What is raised for a number that is too large for a database, or text that is none."""


class ApiError(Exception):
    """An answer to the client that says what went wrong and what to do next."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The HTTP response."""
        headers = {"retry-after": str(self.retry_after)} if self.retry_after else None
        return json_response(self.body(), self.status, headers)


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response, serialised with orjson."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def not_found(what: str, name: str, hint: str) -> ApiError:
    """404: nothing of that name; `hint` says where to look."""
    return ApiError(404, f"No {what} {name!r}. {hint}", code=f"{what}_not_found")


def model_not_found(name: str, known: Sequence[str]) -> ApiError:
    """404 for an unknown model, naming those that there are."""
    models = ", ".join(known) if known else "none yet: create a policy with POST /v1/policies"
    return ApiError(
        404,
        f"The model {name!r} does not exist. Models served here: {models}.",
        param="model",
        code="model_not_found",
    )


def _place(location: Sequence[int | str]) -> str | None:
    """A pydantic location as a path: `("body", "as:list", 1, "reward")` → `[1].reward`."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("as:"):
            path += f".{part}" if path else part
    return path or None


def database_error(error: Exception) -> Response | None:
    """503 while the database does not answer, 422 for a value that it cannot hold.

    None where something else is wrong.
    """
    if isinstance(error, OperationalError) and connection_lost(error):
        message = "The database does not answer. Try again in a few seconds."
        return ApiError(503, message, code="database_unavailable", retry_after=2).response()
    cause = error.orig if isinstance(error, StatementError) else error
    if isinstance(error, DataError) or isinstance(cause, NO_VALUE):
        reason = str(cause).strip().partition("\n")[0]
        return ApiError(422, f"A value in the request cannot be stored: {reason}.").response()
    return None


def unexpected(error: Exception) -> Response:
    """500, without a word of what was being worked on."""
    return ApiError(500, f"strop failed: {type(error).__name__}. See its log.").response()


def install(app: FastAPI) -> None:
    """Make every error of the application come out in OpenAI's format."""

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = "No such route. The routes are listed at /docs."
        if error.status_code == 405:
            message = "This route does not take that method. The routes are listed at /docs."
        response = ApiError(error.status_code, message).response()
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    async def validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = _place(first["loc"])
        message = f"{param}: {first['msg']}" if param else str(first["msg"])
        if first["type"] == "json_invalid":
            return invalid(f"The body is not valid JSON: {first['ctx']['error']}.").response()
        return ApiError(422, message, param=param, code=first["type"]).response()

    async def from_database(_: Request, error: Exception) -> Response:
        response = database_error(error)
        if response is None:
            raise error
        return response

    async def any_error(_: Request, error: Exception) -> Response:
        return unexpected(error)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(StatementError, from_database)
    for kind in NO_VALUE:
        app.add_exception_handler(kind, from_database)
    app.add_exception_handler(Exception, any_error)
