"""What must always hold, whoever changes what."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", tracked("gateway/*.py"), ids=str)
def test_the_gateway_imports_neither_torch_nor_the_trainer(path: Path):
    for name in imports(path):
        assert name.split(".")[0] not in ("torch", "trainer", "trl", "peft", "transformers"), name
    if "store" in path.parts:
        for name in imports(path):
            assert name.split(".")[0] not in ("fastapi", "starlette", "vllm", "aiohttp"), name


@pytest.mark.parametrize("path", tracked("trainer/*.py"), ids=str)
def test_the_trainer_imports_only_the_store(path: Path):
    for name in imports(path):
        if name.split(".")[0] == "gateway":
            assert name.startswith("gateway.store"), name


@pytest.mark.parametrize("path", tracked("gateway/*.py", "trainer/*.py"), ids=str)
def test_a_file_is_one_idea(path: Path):
    assert len(path.read_text().splitlines()) <= 400


def test_no_registry_host_is_named():
    host = re.compile(r"pypi\.org|pythonhosted\.org|registry\.npmjs\.org|deb\.debian\.org")
    for path in tracked():
        if path.suffix in (".png", ".gif") or path == Path(__file__):
            continue
        assert not host.search(path.read_text(errors="replace")), path


@pytest.mark.parametrize("path", tracked("requirements/*.txt"), ids=str)
def test_requirements_are_pinned(path: Path):
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!-]+", line), line
