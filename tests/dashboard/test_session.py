"""What the forms take, without a browser."""

import re

from gateway.store import keys
from tests.dashboard import seed
from tests.gateway.conftest import Running

BROWSER = {"accept": "text/html"}


async def page(strop: Running, path: str, **headers: str) -> tuple[int, str]:
    async with strop.http.get(strop.url + path, headers=headers, allow_redirects=False) as response:
        return response.status, await response.text()


async def send(
    strop: Running, path: str, fields: dict[str, str], **headers: str
) -> tuple[int, str]:
    async with strop.http.post(
        strop.url + path, data=fields, headers=headers, allow_redirects=False
    ) as response:
        return response.status, await response.text()


def token_in(text: str) -> str:
    return re.findall(r'name="token" value="([0-9a-f]{64})"', text)[0]


async def test_a_form_of_another_site_is_refused(strop: Running):
    _, text = await page(strop, "/policies/agent")
    token = token_in(text)
    for fields, headers in (
        ({}, {}),
        ({"token": "0" * 64}, {}),
        ({"token": token}, {"sec-fetch-site": "cross-site"}),
    ):
        status, answer = await send(strop, "/ui/policies/agent/pause", fields, **headers)
        assert status == 403
        assert "Load the page again" in answer
    assert (await strop.get("/v1/policies/agent"))[1]["state"] == "active"
    status, _ = await send(
        strop, "/ui/policies/agent/pause", {"token": token}, **{"sec-fetch-site": "same-origin"}
    )
    assert status == 303
    assert (await strop.get("/v1/policies/agent"))[1]["state"] == "paused"


async def test_a_key_of_one_session_does_not_open_the_forms_of_another(strop: Running):
    with strop.gateway.database.write() as connection:
        _, one = keys.create(connection, "default", "", ["admin"])
        _, other = keys.create(connection, "default", "", ["admin"])
    _, text = await page(strop, "/policies/agent", cookie=f"strop_key={one}")
    fields = {"token": token_in(text)}
    status, _ = await send(strop, "/ui/policies/agent/pause", fields, cookie=f"strop_key={other}")
    assert status == 403
    status, _ = await send(strop, "/ui/policies/agent/pause", fields, cookie=f"strop_key={one}")
    assert status == 303


async def test_a_cookie_is_no_key_for_the_api(strop: Running):
    with strop.gateway.database.write() as connection:
        _, secret = keys.create(connection, "default", "", ["admin"])
    cookie = f"other=1; strop_key={secret}"
    assert (await page(strop, "/", cookie=cookie))[0] == 200
    for path in ("/v1/policies", "/metrics", "/docs", "/v1/export"):
        assert (await page(strop, path, cookie=cookie))[0] == 401, path


async def test_who_has_no_key_is_sent_to_the_form_or_told_in_json(strop: Running):
    with strop.gateway.database.write() as connection:
        _, reader = keys.create(connection, "default", "", ["read"])
        _, rewards = keys.create(connection, "default", "", ["inference"])
    assert (await page(strop, "/", **BROWSER))[0] == 303
    assert (await page(strop, "/"))[0] == 401
    status, text = await page(strop, "/ui/login", **BROWSER)
    assert status == 200
    fields = {"token": token_in(text)}
    for key, code in (("", 401), ("sk-strop-guess", 401), (rewards, 403)):
        status, answer = await send(strop, "/ui/login", {**fields, "key": key})
        assert status == code
        assert 'role="alert"' in answer
    assert (await send(strop, "/ui/login", {**fields, "key": reader}))[0] == 303
    # A key that may read moves no lever, whatever it sends.
    _, text = await page(strop, "/", cookie=f"strop_key={reader}")
    status, _ = await send(
        strop,
        "/ui/policies/agent/pause",
        {"token": token_in(text)},
        cookie=f"strop_key={reader}",
    )
    assert status == 403


async def test_styles_and_scripts_need_no_key_and_stay_in_their_folder(strop: Running):
    with strop.gateway.database.write() as connection:
        keys.create(connection, "default", "", ["read"])
    for name in ("style.css", "live.js", "htmx-2.0.11.min.js", "icon.svg", "htmx-LICENSE.txt"):
        assert (await page(strop, f"/ui/static/{name}"))[0] == 200, name
    for name in ("../pages.py", "..%2Fpages.py", "nothing.js"):
        assert (await page(strop, f"/ui/static/{name}"))[0] in (401, 404), name


async def test_a_page_loads_nothing_from_elsewhere_and_has_nothing_inline(strop: Running):
    ids = await seed.three(strop)
    seed.history(strop, ids)
    for path in ("/", "/policies/agent", "/trajectories/run%2F0", "/steps/1", "/groups"):
        _, text = await page(strop, path)
        assert not re.search(r'(?:src|href)="(?:https?:)?//', text), path
        assert not re.search(r"<style|\sstyle=|\son\w+=\"[^&]", text.replace(seed.EVIL, "")), path
        assert not re.search(r"<script(?![^>]* src=)", text), path
