"""Forms and parts of pages in a real browser: signing in, refusals, paging, one answer's tokens."""

import re

import pytest
from playwright.async_api import Browser
from tokenizers import Tokenizer, models

from gateway.dashboard import views
from gateway.store import queries
from tests.dashboard import seed
from tests.dashboard.test_pages import FULL, filled, opened, serious
from tests.gateway.conftest import Running
from tests.toy_vllm.model import TOKENS


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious_where_one_signs_in_or_is_refused(
    browser: Browser, strop: Running, scheme: str, width: int
):
    await filled(strop)
    seed.trial(strop, 4)
    # axe is put into the page, which the page's policy forbids to anybody else.
    context = await browser.new_context(
        base_url=strop.url,
        color_scheme=scheme,
        bypass_csp=True,
        viewport={"width": width, "height": 800},
    )
    page = await context.new_page()
    await page.goto("/ui/login")
    assert await serious(page) == []
    await page.get_by_label("Key").fill("sk-strop-guess")
    await page.get_by_role("button", name="Sign in").click()
    await page.wait_for_selector("[role=alert], h1:text('Overview')")
    assert await serious(page) == []
    await page.goto("/policies/agent")
    await strop.post("/v1/policies/agent/drop", {})
    await page.get_by_text("Promote…").click()
    await page.get_by_role("button", name="Promote @4").click()
    await page.wait_for_selector("[role=alert]")
    assert await serious(page) == []
    await context.close()


def write_tokenizer(strop: Running) -> None:
    """The tokens of the vLLM that is played, as a base model's folder has them."""
    texts = [token.decode("latin-1") for token in TOKENS]
    model = models.WordLevel(
        {text: number for number, text in enumerate(texts)}, unk_token=texts[0]
    )
    folder = strop.gateway.publisher.catalog.policies[("default", "agent")].base_model
    Tokenizer(model).save(f"{folder}/tokenizer.json")


async def test_an_answer_is_read_token_by_token_with_its_probabilities(
    browser: Browser, strop: Running
):
    write_tokenizer(strop)
    (first, *_) = await seed.three(strop)
    with strop.gateway.database.read() as connection:
        logged = queries.completion(connection, "default", first).choices[0]
    async with opened(browser, strop, "/trajectories/run%2F0") as page:
        # Not before somebody asks for them.
        assert await page.locator(".tokens").count() == 0
        button = page.get_by_role("button", name="Probability of each token").first
        await button.focus()
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".tokens.said span")
        spans = page.locator(".tokens.said").first.locator("span")
        texts = [TOKENS[number].decode("latin-1") for number in logged.token_ids]
        assert await spans.all_text_contents() == texts
        titles = [await span.get_attribute("title") or "" for span in await spans.all()]
        shown = [float(re.findall(r"([0-9.]+)%$", title)[0]) for title in titles]
        chances = [2.718281828**logprob * 100 for logprob in logged.logprobs]
        assert shown == pytest.approx(chances, abs=0.06)
        kinds = [await span.get_attribute("class") for span in await spans.all()]
        bounds = (10, 40, 70, 95)
        assert kinds == [f"p{sum(chance >= bound for bound in bounds)}" for chance in chances]
        # What a colour and a title say, a table says to those who see neither.
        await page.get_by_text("As a table").first.click()
        rows = await page.locator("details[open] tbody tr").all_inner_texts()
        assert len(rows) == len(texts)
        assert f"{shown[0]:.1f}%" in rows[0]


async def test_both_lists_are_paged_and_narrowed_down_alike(browser: Browser, strop: Running):
    await filled(strop)
    seed.more_steps(strop, views.STEPS + 5)
    ids = await seed.more_groups(strop, views.GROUPS + 5)
    assert len(ids) == views.GROUPS + 5
    for path, cell, most in (
        ("/groups", "tbody td:first-child a", views.GROUPS),
        ("/steps", "tbody td:first-child a", views.STEPS),
    ):
        async with opened(browser, strop, path) as page:
            await page.get_by_label("Policy").select_option("agent")
            await page.get_by_role("button", name="Show").click()
            await page.wait_for_url(f"**{path}?policy=agent")
            assert await page.get_by_role("link", name="Newest").count() == 0
            first = await page.locator(cell).all_inner_texts()
            assert len(first) == most
            await page.get_by_role("link", name="Older").click()
            await page.wait_for_url(f"**{path}?before=*")
            assert "policy=agent" in page.url
            older = await page.locator(cell).all_inner_texts()
            assert older
            assert not set(older) & set(first)
            assert await page.get_by_role("link", name="Older").count() == 0
            await page.get_by_role("link", name="Newest").click()
            await page.wait_for_url(f"**{path}?policy=agent")
            assert await page.locator(cell).all_inner_texts() == first
        async with opened(browser, strop, f"{path}?before=0") as page:
            assert "There are no older ones" in await page.inner_text("main")
            assert await page.get_by_role("link", name="Newest").count() == 1


async def test_on_a_phone_a_number_stands_beside_its_name(browser: Browser, strop: Running):
    await filled(strop)
    async with opened(browser, strop, "/steps/1", viewport={"width": 390, "height": 800}) as page:
        for region, name in (("Metrics", "gradient norm"), ("rewards", "style")):
            row = page.get_by_role("region", name=region).locator("tr", has_text=name)
            box = await row.locator(".n").bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= 390, name


async def test_one_of_several_choices_is_rewarded_by_itself(browser: Browser, strop: Running):
    headers = {"X-Strop-Trajectory": "several"}
    messages = [{"role": "user", "content": "Name a colour."}]
    reply = await strop.client.chat.completions.create(
        model="agent", messages=messages, n=3, max_tokens=4, extra_headers=headers
    )
    async with opened(browser, strop, "/trajectories/several") as page:
        answers = page.locator(".message.assistant")
        for place, choice in enumerate(reply.choices):
            shown = await answers.nth(place).inner_text()
            assert shown.startswith(f"choice {choice.index}")
            assert (choice.message.content or "") in shown
        target = page.get_by_label("For")
        offered = await target.locator("option").all_inner_texts()
        turn = "turn 1"
        assert offered == ["the whole trajectory", turn, *(f"{turn}, choice {n}" for n in range(3))]
        await target.select_option("turn 1, choice 2")
        await page.get_by_role("button", name="Good").click()
        await page.wait_for_selector("text=The reward 1 counts")
        await target.select_option("turn 1, choice 0")
        await page.get_by_label("Number").fill("0.25")
        await page.get_by_role("button", name="Post").click()
        await page.wait_for_selector("text=The reward 0.25 counts")
        rows = await page.get_by_role("region", name="All rewards").locator("tbody tr").all()
        assert ["turn 1, choice 0" in await row.inner_text() for row in rows] == [True, False]
        assert ["turn 1, choice 2" in await row.inner_text() for row in rows] == [False, True]
        # A form that was tampered with, or is older than what it is about.
        for wrong in ("7", "none"):
            value = f"{wrong}/{reply.id}"
            await target.evaluate("(one, value) => (one.options[1].value = value)", value)
            await target.select_option("turn 1")
            await page.get_by_role("button", name="Bad").click()
            await page.wait_for_selector("[role=alert]")
            await page.get_by_role("link", name="Back").click()
            await page.wait_for_selector("text=Reward it")
    _, body = await strop.get("/v1/rewards?trajectory_id=several")
    found = {(r["completion_id"], r["choice"]): r["reward"] for r in body["data"]}
    assert found == {(reply.id, 2): 1.0, (reply.id, 0): 0.25}


async def test_a_single_answer_offers_no_choices(browser: Browser, strop: Running):
    await seed.three(strop)
    async with opened(browser, strop, "/trajectories/run%2F0") as page:
        offered = await page.get_by_label("For").locator("option").all_inner_texts()
        assert offered == ["the whole trajectory", "turn 1", "turn 2"]


async def test_traffic_has_its_two_axes_named(browser: Browser, strop: Running):
    await seed.three(strop)
    async with opened(browser, strop, "/") as page:
        chart = page.get_by_role("img", name="Completions of each of the last 60 minutes")
        texts = await chart.locator("text").all_text_contents()
        assert texts == ["0", "5", "45 min ago", "30 min ago", "15 min ago", "now"]


BEYOND = 2**70
ODD = (
    f"/steps/{BEYOND}",
    "/steps/-1",
    "/steps/x",
    "/steps/\u00b2",
    f"/steps?before={BEYOND}",
    "/steps?before=x",
    "/groups?before=x",
    "/groups?before=nan",
    "/groups?before=1e400",
    "/groups?policy=%00",
    "/groups?policy=" + "p" * 3_000,
    "/groups/agent/%00",
    "/trajectories/%ff%fe",
    "/trajectories/%00",
    "/policies/%00",
    "/policies/agent?said=" + "s" * 1_000,
    f"/ui/tokens/nobody/{BEYOND}",
    "/ui/tokens/nobody/x",
)


@pytest.mark.parametrize("path", ODD, ids=lambda path: path[:30])
async def test_an_odd_address_is_answered_with_a_page(strop: Running, path: str):
    async with strop.http.get(strop.url + path) as response:
        text = await response.text()
        assert response.status in (200, 404), text
        assert response.content_type == "text/html"
        assert "<h1>" in text


async def test_a_form_that_was_tampered_with_is_refused_in_words(strop: Running):
    await seed.three(strop)
    async with strop.http.get(strop.url + "/trajectories/run%2F0") as response:
        (token, *_) = re.findall(r'name="token" value="([^"]+)"', await response.text())
    reward = {"trajectory": "run/0", "number": "1"}
    for path, fields, words in (
        ("reward", {**reward, "number": "nan"}, "nan is no finite number"),
        ("reward", {**reward, "number": "1e400"}, "1e400 is no finite number"),
        ("reward", {"trajectory": "run/0"}, "Nothing is no finite number"),
        ("reward", {**reward, "name": "n" * 400}, "name: String should have at most"),
        ("reward", {**reward, "target": f"{BEYOND}/x"}, "No completion"),
        ("policies/agent/rollback", {"version": str(BEYOND)}, "Choose the version"),
        ("policies/agent/rollback", {"version": "x"}, "Choose the version"),
        ("policies/agent/nothing", {}, "There is no nothing"),
    ):
        data = {**fields, "token": token}
        async with strop.http.post(
            f"{strop.url}/ui/{path}", data=data, allow_redirects=False
        ) as response:
            text = await response.text()
            assert 400 <= response.status < 500, path
            assert words in text, path
            assert 'role="alert"' in text
    _, body = await strop.get("/v1/rewards?trajectory_id=run/0")
    assert len(body["data"]) == 2


MARKED = """() => [...document.querySelectorAll(
  "a[href], button, input:not([type=hidden]), select, summary, [tabindex='0']"
)].filter((one) => one.checkVisibility()).map((one, n) => (one.dataset.stop = n))"""
FOCUSED = """() => {
  const one = document.activeElement;
  const style = getComputedStyle(one);
  return [one.dataset.stop ?? null, style.outlineStyle !== "none" && style.outlineWidth !== "0px"];
}"""


@pytest.mark.parametrize("name", ["overview", "policy", "groups", "trajectory", "step"])
async def test_the_keyboard_reaches_everything_and_shows_where_it_is(
    browser: Browser, strop: Running, name: str
):
    await filled(strop)
    seed.trial(strop, 4)
    async with opened(browser, strop, FULL[name]) as page:
        await page.wait_for_selector("text=live")
        # Its first stop leads past the navigation.
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "To the content"
        await page.keyboard.press("Enter")
        assert page.url.endswith("#content")
        await page.reload()
        stops = set(map(str, await page.evaluate(MARKED)))
        assert len(stops) > 5
        reached, unseen = set(), set()
        for _ in range(len(stops) + 2):
            await page.keyboard.press("Tab")
            stop, outlined = await page.evaluate(FOCUSED)
            if stop is not None:
                reached.add(stop)
                if not outlined:
                    unseen.add(stop)
        assert reached == stops
        assert unseen == set()
