"""What the dashboard's forms do. Each is the same as a route of the API, after the same checks."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError
from starlette.responses import HTMLResponse, RedirectResponse, Response

from gateway.api import life, policies, rewards
from gateway.auth import COOKIE, Authenticator
from gateway.dashboard import session
from gateway.dashboard.rendering import page
from gateway.errors import ApiError
from gateway.gateway import Gateway, gateway_of

router = APIRouter(include_in_schema=False)
Strop = Annotated[Gateway, Depends(gateway_of)]


def _back(to: str, said: str) -> RedirectResponse:
    return RedirectResponse(f"{to}?said={quote(said)}", 303)


def _refused(request: Request, error: ApiError, back: str) -> HTMLResponse:
    return page(request, "refused.html", error.status, message=error.message, back=back)


@router.get("/ui/login", response_class=HTMLResponse)
async def ask_for_key(request: Request) -> HTMLResponse:
    """The form that takes a key."""
    return page(request, "login.html", message=None)


@router.post("/ui/login")
async def take_key(request: Request) -> Response:
    """Check a key, and leave it with the browser."""
    key = ""
    try:
        key = (await session.form(request)).get("key", "").strip()
        authenticator: Authenticator = request.app.state.authenticator
        client = request.client.host if request.client else "127.0.0.1"
        who = await authenticator.principal({"authorization": f"Bearer {key}"}, client)
        if not {"read", "admin"} & who.scopes:
            raise ApiError(403, "This key may not read: make one with the scope read.")
    except ApiError as error:
        message = "Enter a key." if not key and error.status == 401 else error.message
        return page(request, "login.html", error.status, message=message)
    response = RedirectResponse("/", 303)
    session.sign_in(response, request, key)
    return response


@router.post("/ui/logout")
async def forget_key(request: Request) -> Response:
    """Take the key away from the browser."""
    await session.form(request)
    response = RedirectResponse("/ui/login", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


@router.post("/ui/reward")
async def post_reward(request: Request, gateway: Strop) -> Response:
    """Post a reward: a thumb, a number, a comment."""
    back = "/"
    try:
        fields = await session.form(request)
        trajectory = fields.get("trajectory", "")
        back = f"/trajectories/{quote(trajectory, safe='')}"
        completion, choice = _target(fields.get("target", ""))
        thumb, number = fields.get("thumb"), fields.get("number", "").strip()
        try:
            value = float(thumb if thumb is not None else number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ApiError(
                422, f"{number or 'Nothing'} is no finite number. Enter one, or use a thumb."
            )
        try:
            body = rewards.RewardBody(
                reward=value,
                completion_id=completion,
                choice=choice,
                trajectory_id=None if completion else trajectory,
                name=fields.get("name", "").strip() or "reward",
                comment=fields.get("comment", "").strip() or None,
            )
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ApiError(422, f"{wrong['loc'][0]}: {wrong['msg']}.") from None
        await rewards.post_rewards(body, gateway)
    except ApiError as error:
        return _refused(request, error, back)
    return _back(back, f"The reward {value:g} counts.")


def _target(chosen: str) -> tuple[str | None, int | None]:
    """Completion and choice of what the form calls a turn, `3/chatcmpl-…` one of its answers."""
    number, slash, completion = chosen.partition("/")
    if slash and number.isdecimal():
        return completion, int(number)
    return chosen or None, None


Action = Callable[[str, dict[str, str], Gateway], Awaitable[str]]


async def _rollback(name: str, fields: dict[str, str], gateway: Gateway) -> str:
    version = fields.get("version", "")
    if not version.isdecimal() or len(version) > 9:
        raise ApiError(422, "Choose the version to go back to.")
    await policies.roll_back(name, policies.Rollback(version=int(version)), gateway)
    return f"{name} serves @{version} now, and trains from it."


async def _pause(name: str, fields: dict[str, str], gateway: Gateway) -> str:
    reason = fields.get("reason", "").strip() or "paused on the dashboard"
    await life.pause(name, gateway, life.Pause(reason=reason[:1000]))
    return f"{name} is served and not trained."


async def _resume(name: str, _: dict[str, str], gateway: Gateway) -> str:
    await life.resume(name, gateway, None)
    return f"{name} is trained again."


async def _promote(name: str, fields: dict[str, str], gateway: Gateway) -> str:
    await life.promote(name, gateway, _trial(fields))
    return f"{name} serves @{fields.get('version')} to everybody."


async def _drop(name: str, fields: dict[str, str], gateway: Gateway) -> str:
    await life.drop(name, gateway, _trial(fields))
    return f"{name}@{fields.get('version')} serves nobody."


def _trial(fields: dict[str, str]) -> life.Trial:
    version = fields.get("version", "")
    return life.Trial(version=int(version) if version.isdecimal() else None)


_ACTIONS: dict[str, Action] = {
    "rollback": _rollback,
    "pause": _pause,
    "resume": _resume,
    "promote": _promote,
    "drop": _drop,
}


@router.post("/ui/policies/{name}/{action}")
async def act(name: str, action: str, request: Request, gateway: Strop) -> Response:
    """Pull one of a policy's levers."""
    back = f"/policies/{quote(name, safe='')}"
    try:
        fields = await session.form(request)
        chosen = _ACTIONS.get(action)
        if chosen is None:
            raise ApiError(404, f"There is no {action}.")
        # A lever that was pulled is pulled whole, whoever hangs up.
        said = await asyncio.shield(chosen(name, fields, gateway))
    except ApiError as error:
        return _refused(request, error, back)
    return _back(back, said)
