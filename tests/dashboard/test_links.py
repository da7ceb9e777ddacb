"""Where a page leads to: a trajectory's traces in Langfuse, and the state that a group is in."""

import asyncio
import re

from playwright.async_api import Browser

from gateway.tracing import ids
from gateway.tracing.settings import LangfuseProject
from tests.dashboard import seed
from tests.dashboard.test_pages import opened
from tests.gateway.conftest import Running
from tests.store.conftest import Captured, captured

__all__ = ["captured"]

AT = "http://127.0.0.1:9"
"""Nobody is there: links are made without asking Langfuse."""
OURS = LangfuseProject(public_key="pk", secret_key="sk", base_url=AT)


async def links(browser: Browser, strop: Running, trajectory: str) -> list[tuple[str, str]]:
    """Words and traces of the links to Langfuse on a trajectory's page."""
    async with opened(browser, strop, f"/trajectories/{trajectory}") as page:
        found = await page.locator(f"a[href^='{AT}/trace/']").all()
        return [
            (await one.inner_text(), (await one.get_attribute("href") or "").rpartition("/")[2])
            for one in found
        ]


async def test_a_trajectory_leads_to_each_of_its_traces(
    browser: Browser, strop: Running, captured: Captured
):
    strop.gateway.settings.langfuse.projects["default"] = OURS
    await seed.three(strop)
    assert await links(browser, strop, "run%2F1") == [
        ("in Langfuse", ids.trace_id("default", "run/1"))
    ]
    # A sub-agent is in the trace of what started it.
    assert await links(browser, strop, "helper") == [
        ("in Langfuse", ids.trace_id("default", "run/0"))
    ]
    # What the caller traces itself is in the caller's.
    callers = "ab" * 16
    await strop.client.chat.completions.create(
        model="agent",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=2,
        extra_headers={
            "X-Strop-Trajectory": "traced",
            "traceparent": f"00-{callers}-{'cd' * 8}-01",
        },
    )
    assert await links(browser, strop, "traced") == [("in Langfuse", callers)]
    # What is too long for one trace goes on in further ones.
    items = [
        captured(trajectory="long", client_metadata={"note": "m" * 2_000}, created_at=1000.0 + n)
        for n in range(1_500)
    ]
    await asyncio.gather(*(strop.gateway.writer.store(item) for item in items))
    found = await links(browser, strop, "long")
    assert len(found) > 1
    assert found == [
        (f"part {part + 1}", ids.trace_id("default", "long", part)) for part in range(len(found))
    ]


async def test_without_langfuse_no_page_speaks_of_it(browser: Browser, strop: Running):
    await seed.three(strop)
    async with opened(browser, strop, "/trajectories/run%2F0") as page:
        assert "Langfuse" not in await page.inner_text("main")


async def test_a_group_has_the_state_that_is_counted_above_it(browser: Browser, strop: Running):
    for number in range(4):
        reply = await strop.client.chat.completions.create(
            model="agent",
            messages=seed.ASK,
            max_tokens=2,
            extra_headers={"X-Strop-Group": "full", "X-Strop-Trajectory": f"full/{number}"},
        )
        await strop.post("/v1/rewards", {"completion_id": reply.id, "reward": number / 3})
    for path in ("/", "/groups"):
        async with opened(browser, strop, path) as page:
            row = page.get_by_role("row").filter(has_text="full")
            assert re.search(r"\bready\b", await row.inner_text()), path
    async with opened(browser, strop, "/") as page:
        await page.wait_for_selector("text=1 group ready")
