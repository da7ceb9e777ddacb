"""docker-compose.yml, as far as it can be checked without an engine."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
FILE = yaml.safe_load(TEXT)
SERVICES = FILE["services"]
EXAMPLE = dict(
    line.split("=", 1)
    for line in (ROOT / ".env.example").read_text().splitlines()
    if line and not line.startswith("#")
)

# Keys that the Compose specification knows for a service; a typing error is none of them.
SERVICE_KEYS = {
    "build", "command", "configs", "deploy", "depends_on", "entrypoint", "environment",
    "healthcheck", "image", "ipc", "ports", "restart", "volumes",
}  # fmt: skip


def variables(text: str) -> dict[str, str]:
    """Name → how it is given (`:?…`, `:-…` or nothing)."""
    return dict(re.findall(r"(?<!\$)\$\{(\w+)([^}]*)\}", text))


def test_every_service_is_whole():
    wanted = {"gateway", "trainer", "vllm", "postgres", "langfuse-web", "langfuse-worker"}
    assert wanted <= set(SERVICES)
    for name, service in SERVICES.items():
        assert set(service) <= SERVICE_KEYS, name
        assert service.get("image"), name
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name
        assert service["restart"] == "unless-stopped", name


def test_services_wait_for_services_that_exist_and_have_a_health_check():
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert "healthcheck" in SERVICES[other], (name, other)
            assert how == {"condition": "service_healthy"}


def test_volumes_and_configs_are_declared():
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in FILE["volumes"], name
        for config in service.get("configs", ()):
            assert config["source"] in FILE["configs"], name


def test_adapters_are_under_one_path_for_all_three():
    for name in ("gateway", "trainer", "vllm"):
        assert any(
            volume.startswith("artifacts:/artifacts") for volume in SERVICES[name]["volumes"]
        )
    assert SERVICES["gateway"]["environment"]["STROP_ARTIFACTS_DIR"] == "/artifacts"


def test_there_is_no_default_secret():
    secret = re.compile(r"PASSWORD|SECRET|SALT|KEY|TOKEN")
    for name, given in variables(TEXT).items():
        if secret.search(name) and name != "HF_TOKEN":
            assert given.startswith(":?"), f"{name} has a default"
    for name, value in EXAMPLE.items():
        assert value == "", f"{name} has a value in .env.example"
    for service in SERVICES.values():
        for name, value in (service.get("environment") or {}).items():
            if secret.search(name) and "KEY_ID" not in name:
                assert "${" in value, f"{name} is spelt out"


def test_whatever_has_to_be_set_is_in_the_example():
    required = {name for name, given in variables(TEXT).items() if given.startswith(":?")}
    assert required <= set(EXAMPLE)


def test_only_this_machine_reaches_it():
    for service in SERVICES.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("flag", ["--enable-lora", "--logprobs-mode=processed_logprobs"])
def test_vllm_runs_as_strop_needs_it(flag):
    assert flag in SERVICES["vllm"]["command"]
    assert SERVICES["vllm"]["environment"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_what_the_image_copies_exists():
    recipe = SERVICES["gateway"]["build"]["dockerfile_inline"]
    for line in re.findall(r"^COPY (.+)$", recipe, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists() or source == "README.md", source
