"""Who looks at the dashboard: a key in a cookie, and the token that its forms carry.

The cookie holds the key itself, `HttpOnly` and `SameSite=Strict`, and is taken for the pages alone,
never under `/v1`: no page of another site can use the API with it. The forms' token is derived from
the key, or, while there are no keys, from a random secret in the data folder.
"""

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response

from gateway.auth import COOKIE, EVERYTHING, Principal
from gateway.errors import ApiError
from gateway.gateway import Gateway, gateway_in

_MOST_BYTES = 64 * 1024
_FOR_DAYS = 30


@dataclass(frozen=True, slots=True)
class Visitor:
    """What a page may offer."""

    may_read: bool
    may_reward: bool
    may_administer: bool
    signed_in: bool
    """Whether there is a key to sign out of."""
    token: str
    """What forms carry, so that only these pages' forms are taken."""


def visitor(request: Request) -> Visitor:
    """Who looks at a page; nobody's, where it was not asked who it is."""
    principal: Principal | None = request.scope.get("state", {}).get("principal")
    scopes = principal.scopes if principal is not None else frozenset()
    administers = "admin" in scopes
    return Visitor(
        may_read=principal is not None,
        may_reward=administers or "reward" in scopes,
        may_administer=administers,
        signed_in=cookie(request.headers) is not None and principal is not EVERYTHING,
        token=_token(request),
    )


def cookie(headers: Mapping[str, str]) -> str | None:
    """The key in the cookie."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return found.value if found is not None and found.value else None


def _token(request: Request) -> str:
    key = cookie(request.headers)
    secret = key.encode() if key else _open_secret(gateway_in(request.scope))
    return hmac.digest(sha256(secret).digest(), b"strop forms", sha256).hex()


def _open_secret(gateway: Gateway) -> bytes:
    """Of a strop without keys, the same for all processes on this machine."""
    path = gateway.settings.data_dir / "forms-secret"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return _make(path)


def _make(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    partial.touch(mode=0o600)
    partial.write_bytes(secrets.token_bytes(32))
    try:
        # The first wins; the others take its secret.
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    return path.read_bytes()


async def form(request: Request) -> dict[str, str]:
    """The fields of a form that one of our pages sent.

    Raises:
        ApiError: 413, or 403 where another site sent it, or the page is from another session.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise ApiError(413, "The form is too large.", code="body_too_large")
    try:
        fields = {name: values[-1] for name, values in parse_qs(body.decode()).items()}
    except (UnicodeDecodeError, ValueError):
        fields = {}
    elsewhere = request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
    given = fields.pop("token", "")
    if elsewhere or not hmac.compare_digest(given.encode(), _token(request).encode()):
        raise ApiError(
            403,
            "This form does not come from a page of this session. Load the page again.",
            code="foreign_form",
        )
    return fields


def sign_in(response: Response, request: Request, key: str) -> None:
    """Leave the key with the browser."""
    response.set_cookie(
        COOKIE,
        key,
        max_age=_FOR_DAYS * 86_400,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
