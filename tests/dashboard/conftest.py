"""A headless Chromium before a running gateway."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, async_playwright

from tests.gateway.conftest import MakeStrop, Running, make_strop, running, strop, toy_base

__all__ = ["MakeStrop", "Running", "make_strop", "running", "strop", "toy_base"]

CHROMIUM = os.environ.get("STROP_TEST_CHROMIUM") or shutil.which("chromium") or ""
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
VENDOR = Path(__file__).parent / "vendor"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Chromium; where there is none, the test is skipped, or fails where CI says that it must not."""
    if not CHROMIUM:
        message = "no Chromium is installed (Debian: apt-get install chromium)"
        if os.environ.get("STROP_TEST_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, headless=True
        )
        yield found
        await found.close()
