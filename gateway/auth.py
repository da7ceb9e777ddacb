"""Who is asking: a key's project and what it may do.

Without any key strop is open to this machine and to nobody else. A key is looked up by its digest;
what was found is remembered for a few seconds, so that a revoked key is refused soon and the
database is not asked for every request.
"""

import asyncio
import hmac
import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from sqlalchemy.exc import OperationalError
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.capture.translate_messages import error_body
from gateway.errors import ApiError, json_response
from gateway.http import headers_of
from gateway.store import Database, keys
from gateway.store.journal import connection_lost
from gateway.store.models import DEFAULT_PROJECT

T = TypeVar("T")

_REMEMBERED_SECONDS = 5.0
_REMEMBERED = 10_000
_NEVER = float("-inf")
_OPEN = frozenset({"/healthz", "/readyz", "/ui/login"})
_SHOWS_MORE = "/readyz"
"""Open to everybody, and says more to those who may read."""
_OPEN_FOLDER = "/ui/static/"

COOKIE = "strop_key"
"""Holds the key of somebody who looks at the dashboard."""
_PAGES = re.compile(r"/|/(policies|groups|trajectories|steps|ui)(/.*)?")
"""Where the cookie is taken, and nowhere else: another site's page could send it to the API."""

# What a route needs, the first that fits; whatever is not here needs `admin`.
_NEEDS = (
    ("POST", r"(/rollouts/[^/]+/[^/]+)?/v1/(chat/completions|completions|messages|"
             r"messages/count_tokens|responses(/input_tokens|/[^/]+/cancel)?|embeddings)",
     "inference"),
    ("GET", r"(/rollouts/[^/]+/[^/]+)?/v1/models(/.*)?", "inference"),
    ("POST", r"/v1/rewards", "reward"),
    ("POST", r"/ui/reward", "reward"),
    ("POST", r"/ui/logout", "read"),
    ("GET", r"/.*", "read"),
)  # fmt: skip
_ROUTES = [(method, re.compile(path), scope) for method, path, scope in _NEEDS]


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who may do something in a project."""

    project: str
    scopes: frozenset[str]


EVERYTHING = Principal(DEFAULT_PROJECT, frozenset(keys.SCOPES))


def needed_scope(method: str, path: str) -> str:
    """The scope that a request needs."""
    for of_method, pattern, scope in _ROUTES:
        if method in (of_method, "HEAD" if of_method == "GET" else of_method) and (
            pattern.fullmatch(path)
        ):
            return scope
    return "admin"


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Authenticator:
    """Looks keys up, and remembers what it found for a few seconds."""

    def __init__(self, database: Database, admin_key: str = ""):
        self._database = database
        self._admin = keys.digest(admin_key) if admin_key else None
        self._known: OrderedDict[bytes, tuple[float, Principal | None]] = OrderedDict()
        self._keys_exist = (_NEVER, False)

    async def principal(self, headers: Mapping[str, str], client: str) -> Principal:
        """Who sends a request.

        Raises:
            ApiError: 401 without a valid key; 403 from elsewhere while there are no keys.
        """
        secret = _secret(headers)
        if not await self._needed():
            if not is_loopback(client):
                raise ApiError(
                    403,
                    "strop has no keys yet and so answers only its own machine. Make one with "
                    "`strop keys create`.",
                    code="no_keys",
                )
            return EVERYTHING
        if secret is None:
            raise ApiError(
                401,
                "A key is needed: send `Authorization: Bearer sk-strop-…`. "
                "`strop keys create` makes one.",
                code="missing_api_key",
            )
        found = await self._find(keys.digest(secret))
        if found is None:
            raise ApiError(401, "This key is not known, or was revoked.", code="invalid_api_key")
        return found

    async def _needed(self) -> bool:
        if self._admin is not None:
            return True
        asked_at, exist = self._keys_exist
        if not exist and time.monotonic() - asked_at > _REMEMBERED_SECONDS:
            known = (exist,) if asked_at > _NEVER else None
            exist = await _ask(self._ask_whether_keys_exist, known)
            self._keys_exist = (time.monotonic(), exist)
        return exist

    async def _find(self, digest: bytes) -> Principal | None:
        if self._admin is not None and hmac.compare_digest(digest, self._admin):
            return EVERYTHING
        now = time.monotonic()
        known = self._known.get(digest)
        if known is not None and now - known[0] < _REMEMBERED_SECONDS:
            return known[1]
        found = await _ask(lambda: self._look_up(digest), known[1:] if known else None)
        self._known[digest] = (now, found)
        self._known.move_to_end(digest)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return found

    def _look_up(self, digest: bytes) -> Principal | None:
        with self._database.read() as connection:
            key = keys.find(connection, digest)
        return Principal(key.project, key.scopes) if key is not None else None

    def _ask_whether_keys_exist(self) -> bool:
        with self._database.read() as connection:
            return keys.any_exist(connection)


async def _ask(question: Callable[[], T], known: tuple[T] | None) -> T:
    """The database's answer; while it is away, the one that it gave last.

    Raises:
        ApiError: 503, it was never asked this.
    """
    try:
        return await asyncio.to_thread(question)
    except OperationalError as error:
        if not connection_lost(error):
            raise
    if known is None:
        raise ApiError(
            503,
            "The database, which knows the keys, does not answer. Try again in a few seconds.",
            code="database_unavailable",
            retry_after=2,
        )
    return known[0]


def _secret(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    # Anthropic's clients send their key so.
    return headers.get("x-api-key")


def refusal(error: ApiError, path: str) -> Response:
    """The answer, in the format of the surface that was asked."""
    if "/v1/messages" in path:
        headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
        return json_response(error_body(error), error.status, headers)
    return error.response()


async def authenticate(scope: Scope, needed: str) -> None:
    """Put the sender's principal into the scope.

    Raises:
        ApiError: 401 or 403, it is nobody, or may not do what needs the scope `needed`.
    """
    authenticator: Authenticator = scope["app"].state.authenticator
    client = (scope.get("client") or ("127.0.0.1", 0))[0]
    principal = await authenticator.principal(headers_of(scope), client)
    if needed not in principal.scopes and "admin" not in principal.scopes:
        raise ApiError(
            403,
            f"This key may not do that: it needs the scope {needed}.",
            code="insufficient_scope",
        )
    scope.setdefault("state", {})["principal"] = principal


def _take_cookie(scope: Scope) -> None:
    """Let the key in the cookie stand for the header that a browser does not send."""
    headers = headers_of(scope)
    if "authorization" in headers or "x-api-key" in headers:
        return
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE and value:
            scope["strop.headers"] = {**headers, "x-api-key": value}
            return


class Authentication:
    """ASGI middleware: no request passes without a principal that may do what it asks."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with 401 or 403."""
        path = scope["path"] if scope["type"] == "http" else ""
        if not path or path in _OPEN or path.startswith(_OPEN_FOLDER):
            if path == _SHOWS_MORE:
                with suppress(ApiError):
                    await authenticate(scope, "read")
            await self._app(scope, receive, send)
            return
        if _PAGES.fullmatch(path):
            _take_cookie(scope)
        try:
            await authenticate(scope, needed_scope(scope["method"], path))
        except ApiError as error:
            response = refusal(error, path)
            if error.status == 401 and "text/html" in headers_of(scope).get("accept", ""):
                response = RedirectResponse("/ui/login", 303)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)
