"""Clients that run in Node: OpenAI's own, and the Vercel AI SDK."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import Served

HERE = Path(__file__).parent / "node"
CACHE = Path(__file__).resolve().parents[2] / ".strop" / "node-clients"
REQUIRED = os.environ.get("STROP_TEST_REQUIRE_NODE") == "1"
"""Set by CI, where a test that does not run is a test that fails."""


@pytest.fixture(scope="session")
def scripts() -> Path:
    """The scripts, in a folder where the packages that they import are installed."""
    missing = next((name for name in ("node", "npm") if shutil.which(name) is None), None)
    if missing is not None:
        (pytest.fail if REQUIRED else pytest.skip)(f"there is no {missing} here")
    wanted = (HERE / "package.json").read_bytes()
    folder = CACHE / hashlib.sha256(wanted).hexdigest()[:12]
    if not (folder / ".ready").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_bytes(wanted)
        command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        if done.returncode != 0:
            (pytest.fail if REQUIRED else pytest.skip)(f"npm failed: {done.stderr[-2000:]}")
        (folder / ".ready").touch()
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, folder)
    return folder


def node(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["node", *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("surface", ["chat", "responses"])
def test_openai(strop: Served, scripts: Path, surface: str, way: str):
    with strop.episode() as episode:
        node(scripts, "openai.mjs", strop.v1, surface, way)
    episode.is_agent(stream=way == "stream")


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("surface", ["chat", "responses", "compatible"])
def test_the_vercel_ai_sdk(strop: Served, scripts: Path, surface: str, way: str):
    with strop.episode() as episode:
        node(scripts, "vercel.mjs", strop.v1, surface, way)
    episode.is_agent(stream=way == "stream")
