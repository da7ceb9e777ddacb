"""The dashboard in a real browser: every page, every button, with nothing, a little and a lot."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, Page

from gateway.store import keys
from tests.dashboard import seed
from tests.dashboard.conftest import VENDOR
from tests.gateway.conftest import Running

AXE = VENDOR / "axe-4.14.1.min.js"
EMPTY = {"overview": "/", "policy": "/policies/agent", "groups": "/groups", "steps": "/steps"}
FULL = {
    **EMPTY,
    "group": "/groups/agent/invoice%20of%20May",
    "trajectory": "/trajectories/run%2F0",
    "step": "/steps/1",
    "missing": "/trajectories/nobody",
}


@asynccontextmanager
async def opened(browser: Browser, strop: Running, path: str, **options):
    """A page, which must not complain: nothing refused by its own policy, no error, no alert."""
    complaints: list[str] = []
    context = await browser.new_context(base_url=strop.url, **options)
    page = await context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text)
            if message.type == "error" and "the server responded" not in message.text
            else None
        ),
    )
    page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
    context.set_default_timeout(20_000)
    try:
        response = await page.goto(path)
        assert response is not None
        assert "script-src 'self'" in response.headers["content-security-policy"]
        assert "unsafe" not in response.headers["content-security-policy"]
        yield page
        assert complaints == []
    finally:
        # Its stream of events would hold up the gateway's end.
        await context.close()


async def serious(page: Page) -> list[tuple[str, list[str]]]:
    """What axe finds serious or worse on a page, which must fit its window."""
    await page.add_script_tag(content=AXE.read_text())
    result = await page.evaluate("axe.run()")
    assert len(result["passes"]) > 10, "axe did not look"
    wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, page.url
    return [
        (one["id"], [node["target"] for node in one["nodes"]])
        for one in result["violations"]
        if one["impact"] in ("serious", "critical")
    ]


async def findings(browser: Browser, strop: Running, pages: dict[str, str], scheme: str):
    """What axe finds serious or worse, on each page."""
    # axe is put into the page, which the page's policy forbids to anybody else.
    context = await browser.new_context(base_url=strop.url, color_scheme=scheme, bypass_csp=True)
    found = {}
    for name, path in pages.items():
        page = await context.new_page()
        await page.goto(path)
        if name == "trajectory":
            await page.get_by_role("button", name="Probability of each token").first.click()
            await page.wait_for_selector(".tokens")
        for summary in await page.query_selector_all("details.confirm > summary"):
            await summary.click()
        found[name] = await serious(page)
        await page.close()
    await context.close()
    return found


async def filled(strop: Running) -> list[str]:
    ids = await seed.three(strop)
    seed.history(strop, ids)
    return ids


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious_on_any_page(browser: Browser, strop: Running, scheme: str):
    if scheme == "light":
        assert not any((await findings(browser, strop, EMPTY, scheme)).values())
    await filled(strop)
    seed.trial(strop, 4)
    found = await findings(browser, strop, FULL, scheme)
    assert found == {name: [] for name in FULL}


async def test_axe_would_find_something(browser: Browser, strop: Running):
    """A page without a language and with an unnamed picture, to know that the above looks."""
    context = await browser.new_context(base_url=strop.url, bypass_csp=True)
    page = await context.new_page()
    await page.set_content("<img src='x'><p>text</p>")
    await page.add_script_tag(content=AXE.read_text())
    result = await page.evaluate("axe.run()")
    assert {"image-alt", "html-has-lang"} <= {one["id"] for one in result["violations"]}
    await context.close()


async def test_pages_say_what_to_do_when_there_is_nothing(browser: Browser, strop: Running):
    for path, words in (
        ("/", f"OPENAI_BASE_URL={strop.url}/v1, and agent as the model"),
        ("/policies/agent", "No reward yet"),
        ("/groups", f"OPENAI_BASE_URL={strop.url}/v1, and agent as the model"),
        ("/steps", "No step yet"),
        ("/groups/agent/nobody", "There is no group nobody"),
        ("/policies/nobody", "There is no policy nobody"),
        ("/steps/99", "There is no step 99"),
    ):
        async with opened(browser, strop, path) as page:
            assert words in await page.inner_text("main"), path


async def test_on_a_phone_what_a_model_wrote_is_shown_and_not_run(browser: Browser, strop: Running):
    await filled(strop)
    for path in FULL.values():
        async with opened(browser, strop, path, viewport={"width": 390, "height": 800}) as page:
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, path
            assert "hacked" not in await page.title()
            assert await page.query_selector("main img") is None
            assert await page.query_selector("main script") is None
    async with opened(browser, strop, "/trajectories/run%2F0") as page:
        text = await page.inner_text("main")
        # As a message, as a tool's answer, and as a comment.
        assert text.count(seed.EVIL) >= 3


async def test_a_person_can_walk_from_the_front_to_one_token(browser: Browser, strop: Running):
    await filled(strop)
    async with opened(browser, strop, "/") as page:
        assert "serves @4" in await page.inner_text("main")
        await page.get_by_role("link", name="invoice of May").first.click()
        cards = await page.locator(".grid > .card").all_inner_texts()
        assert "reward 1" in cards[0]
        assert "+0.707" in cards[0]
        assert "left out: equal rewards" in cards[1]
        assert "waits for a reward" in cards[2]
        await page.get_by_role("link", name="run/0").click()
        text = await page.inner_text("main")
        assert "Step 1 trained on it" in text
        assert 'look({"in": "/tmp"})' in text
        assert await page.locator("s", has_text="0.2").count() == 1
        await page.get_by_role("button", name="Probability of each token").first.click()
        await page.wait_for_selector(".tokens.said span")
        first = page.locator(".tokens.said span").first
        assert "%" in (await first.get_attribute("title") or "")
        await page.get_by_role("link", name="Step 1").click()
        text = await page.inner_text("main")
        assert "Time per phase" in text
        assert "KL to the reference, nats" in text
        assert await page.locator("svg rect").count() == 4
        await page.get_by_role("navigation").get_by_role("link", name="Steps").click()
        assert "out of memory" in await page.inner_text("main")
        await page.get_by_label("Policy").select_option("agent")
        await page.get_by_role("button", name="Show").click()
        await page.wait_for_url("**/steps?policy=agent")
        await page.go_back()
        await page.goto("/trajectories/helper")
        await page.get_by_role("link", name="run/0").click()
        await page.get_by_role("link", name="helper").click()
        assert page.url.endswith("/trajectories/helper")


async def test_rewards_are_posted_by_thumb_number_and_comment(browser: Browser, strop: Running):
    ids = await seed.three(strop)
    async with opened(browser, strop, "/trajectories/run%2F2") as page:
        await page.get_by_role("button", name="Good").click()
        await page.wait_for_selector(".notice")
        assert "The reward 1 counts" in await page.inner_text(".notice")
        await page.get_by_label("Comment").fill("too slow")
        await page.get_by_role("button", name="Bad").click()
        await page.wait_for_selector("text=The reward 0 counts")
        await page.get_by_label("For").select_option("turn 1")
        await page.get_by_label("Name").fill("style")
        await page.get_by_label("Number").fill("-0.25")
        await page.get_by_label("Number").press("Enter")
        await page.wait_for_selector("text=The reward -0.25 counts")
        await page.get_by_label("Number").fill("many")
        await page.get_by_role("button", name="Post").click()
        await page.wait_for_selector("[role=alert]")
        assert "many is no finite number" in await page.inner_text("main")
        await page.get_by_role("link", name="Back").click()
        await page.wait_for_selector("text=too slow")
    _, body = await strop.get("/v1/rewards?trajectory_id=run/2")
    assert [(r["name"], r["reward"], r["completion_id"], r["comment"]) for r in body["data"]] == [
        ("reward", 1.0, None, None),
        ("reward", 0.0, None, "too slow"),
        ("style", -0.25, ids[2], None),
    ]


async def test_every_lever_of_a_policy_asks_before_it_moves(browser: Browser, strop: Running):
    await filled(strop)

    async def policy() -> dict:
        return (await strop.get("/v1/policies/agent"))[1]

    async with opened(browser, strop, "/policies/agent") as page:
        button = page.get_by_role("button", name="Pause training")
        assert not await button.is_visible()
        await page.get_by_text("Pause…").click()
        await page.get_by_label("Why").fill("looking at it")
        await button.click()
        await page.wait_for_selector("text=is served and not trained")
        found = await policy()
        assert (found["state"], found["state_reason"]) == ("paused", "looking at it")
        # By keyboard alone.
        await page.get_by_text("Resume…").focus()
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=is trained again")
        assert (await policy())["state"] == "active"
        await page.get_by_text("Roll back…").click()
        await page.get_by_label("Version", exact=True).select_option("@0")
        await page.get_by_role("button", name="Roll back", exact=True).click()
        await page.wait_for_selector("text=serves @0 now")
        assert (await policy())["alias"] == 0
        seed.trial(strop, 2)
        await page.reload()
        await page.get_by_text("Drop…").click()
        await page.get_by_role("button", name="Drop @2").click()
        await page.wait_for_selector("text=agent@2 serves nobody")
        assert (await policy())["canary"] is None
        seed.trial(strop, 3)
        await page.reload()
        await page.get_by_text("Promote…").click()
        await page.get_by_role("button", name="Promote @3").click()
        await page.wait_for_selector("text=serves @3 to everybody")
        assert (await policy())["alias"] == 3


async def test_a_lever_that_cannot_move_says_why(browser: Browser, strop: Running):
    await filled(strop)
    seed.trial(strop, 2)
    async with opened(browser, strop, "/policies/agent") as page:
        await strop.post("/v1/policies/agent/drop", {})
        await page.get_by_text("Promote…").click()
        await page.get_by_role("button", name="Promote @2").click()
        await page.wait_for_selector("[role=alert]")
        assert "No version of agent is on trial" in await page.inner_text("main")


async def test_pages_follow_what_happens(browser: Browser, strop: Running):
    async with opened(browser, strop, "/groups") as page:
        await page.wait_for_selector("text=live")
        assert "No group yet" in await page.inner_text("main")
        await seed.three(strop)
        # What came before the stream's first look is no change to it; something later is.
        for _ in range(30):
            seed.happen(strop, "noticed")
            if await page.get_by_role("link", name="invoice of May").count():
                break
            await asyncio.sleep(1)
        else:
            raise AssertionError("the page does not follow")


async def sign_in(page: Page, secret: str) -> None:
    await page.get_by_label("Key").fill(secret)
    await page.get_by_role("button", name="Sign in").click()


async def test_with_keys_it_needs_one(browser: Browser, strop: Running):
    await filled(strop)
    secrets = {}
    with strop.gateway.database.write() as connection:
        for scopes in (["read"], ["read", "reward"], ["admin"], ["inference"]):
            secrets[scopes[-1]] = keys.create(connection, "default", "", scopes)[1]
        secrets["theirs"] = keys.create(connection, "theirs", "", ["admin"])[1]
    async with asyncio.timeout(30):
        # That there are no keys is remembered for some seconds.
        while (await strop.get("/v1/policies"))[0] != 401:
            await asyncio.sleep(0.1)
    async with opened(browser, strop, "/policies/agent") as page:
        assert page.url.endswith("/ui/login")
        assert await page.locator("nav").count() == 0
    async with opened(browser, strop, "/ui/login") as page:
        await sign_in(page, secrets["read"])
        await page.wait_for_selector("text=Overview")
        cookie = (await page.context.cookies())[0]
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert await page.evaluate("document.cookie") == ""
        # The cookie opens no door of the API.
        assert await page.evaluate("fetch('/v1/policies').then(r => r.status)") == 401
        await page.goto("/policies/agent")
        assert await page.get_by_text("Pause…").count() == 0
        await page.goto("/trajectories/run%2F0")
        assert await page.get_by_role("button", name="Good").count() == 0
        await page.get_by_role("button", name="Sign out").click()
        await page.wait_for_url("**/ui/login")
        await page.goto("/")
        assert page.url.endswith("/ui/login")
        await sign_in(page, secrets["reward"])
        await page.wait_for_selector("text=Overview")
        await page.goto("/trajectories/run%2F0")
        assert await page.get_by_role("button", name="Good").count() == 1
        await page.get_by_role("button", name="Sign out").click()
        await sign_in(page, secrets["admin"])
        await page.wait_for_selector("text=Overview")
        await page.goto("/policies/agent")
        await page.get_by_text("Pause…").click()
        await page.get_by_role("button", name="Pause training").click()
        await page.wait_for_selector("text=is served and not trained")
        await page.get_by_role("button", name="Sign out").click()
        await sign_in(page, secrets["theirs"])
        await page.wait_for_selector("text=Overview")
        assert "invoice" not in await page.inner_text("main")
        await page.goto("/trajectories/run%2F0")
        assert "There is no trajectory" in await page.inner_text("main")


async def test_a_hundred_thousand_trajectories(browser: Browser, strop: Running):
    ids = await filled(strop)
    seed.many(strop, ids[1], 100_000)
    async with opened(browser, strop, "/") as page:
        # Counting takes long, and the page does not wait for it.
        await page.wait_for_selector("svg.chart circle", timeout=60_000)
        if "being counted" in await page.inner_text("main"):
            await page.reload()
        times = {}
        for name, path in FULL.items():
            began = time.monotonic()
            await page.goto(path, wait_until="domcontentloaded")
            times[name] = time.monotonic() - began
        assert max(times.values()) < 5, times
        await page.goto("/groups?policy=agent")
        first = await page.locator("td.id a").first.inner_text()
        await page.get_by_role("link", name="Older").click()
        assert await page.locator("td.id a").count() == 40
        assert await page.locator("td.id a").first.inner_text() != first
        await page.get_by_role("link", name="Newest").click()
        assert await page.locator("td.id a").first.inner_text() == first
