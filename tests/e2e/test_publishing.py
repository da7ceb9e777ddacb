"""Publishing under load on the real vLLM: no request fails, no answer is mixed, none is of a wrong
version. What was sampled is held against the same model computed by transformers, with each
version's adapter added to its weights.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from openai import AsyncOpenAI
from safetensors.numpy import load_file
from sqlalchemy import select

from gateway.gateway import Gateway
from gateway.settings import PolicyConfig, Settings
from gateway.store import queries
from gateway.store.models import Completion
from tests.adapters import write_adapter
from tests.conftest import RealVllm
from tests.gateway.conftest import serving
from tests.gateway.publishing import add_version, publish_under_load

PUBLISHES = int(os.environ.get("STROP_TEST_PUBLISHES", "6"))
"""100 for the figure in docs/measurements.md."""
SECONDS_EACH = 20.0

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300 + 30 * PUBLISHES)]

POLICY = "published"


class Truth:
    """The base model in transformers, and what it says under a version."""

    def __init__(self, base_model: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32).eval()

    @contextmanager
    def under(self, folder: Path | None) -> Iterator[None]:
        """The version's adapter is added to the weights, and taken out of them again."""
        modules = dict(self.model.named_modules())
        saved = {}
        with self.torch.no_grad():
            if folder is not None:
                tensors = load_file(folder / "adapter_model.safetensors")
                config = json.loads((folder / "adapter_config.json").read_text())
                scale = config["lora_alpha"] / config["r"]
                for name in [name for name in tensors if "lora_A" in name]:
                    weight = modules[name.split(".lora_A")[0].split("base_model.model.")[1]].weight
                    saved[weight] = weight.clone()
                    low = self.torch.from_numpy(tensors[name])
                    high = self.torch.from_numpy(tensors[name.replace("lora_A", "lora_B")])
                    weight += scale * high @ low
            yield
            for weight, before in saved.items():
                weight.copy_(before)

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Of every token but the first, in nats."""
        with self.torch.no_grad():
            given = self.torch.tensor([ids])
            found = self.model(given[:, :-1]).logits.log_softmax(-1)
            return found.gather(-1, given[:, 1:, None])[0, :, 0].tolist()


async def test_many_publishes_under_sixteen_streams(real_vllm: RealVllm, tmp_path: Path):
    truth = Truth(real_vllm.base_model)
    ids = np.random.default_rng(0).integers(20, 20_000, size=24).tolist()
    with truth.under(None):
        before = truth.logprobs(ids)
    folders: dict[int, Path | None] = {0: None}
    probes = {}
    for number in range(1, PUBLISHES + 1):
        folder = write_adapter(
            tmp_path / f"{number:06d}", real_vllm.base_model, seed=number, scale=0.01
        )
        folders[number] = folder
        with truth.under(folder):
            logprobs = truth.logprobs(ids)
        probes[number] = {"token_ids": ids, "logprobs": logprobs, "previous_logprobs": before}
    settings = Settings(
        data_dir=tmp_path / "strop",
        replicas=[real_vllm.url],
        base_model=str(real_vllm.base_model),
        publish_poll=0.2,
        probe_tolerance=1e-4,
        policies={POLICY: PolicyConfig()},
    )
    async with (
        serving(settings) as (url, gateway),
        AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        await gateway.publisher.reconcile()

        async def write(number: int) -> None:
            add_version(gateway, POLICY, number, folders[number], probes[number])

        load = await publish_under_load(
            gateway, client, POLICY, write, PUBLISHES, 60 + SECONDS_EACH * PUBLISHES
        )
        load.check(POLICY)
        answers = {answer.id for answer in load.answers}
        print(f"{PUBLISHES} publishes, {len(answers)} answers")
        check_what_was_sampled(gateway, truth, folders, answers)


def check_what_was_sampled(
    gateway: Gateway, truth: Truth, folders: dict[int, Path | None], answers: set[str]
) -> None:
    """The logged logprobs of every token are those of the version that the row names."""
    with gateway.database.read() as connection:
        rows = connection.execute(
            select(Completion.id, Completion.version).where(Completion.id.in_(answers))
        ).all()
        stored = [queries.completion(connection, "default", row.id) for row in rows]
    assert {row.id for row in rows} == answers
    by_version = defaultdict(list)
    for row, completion in zip(rows, stored, strict=True):
        by_version[row.version].append(completion)
    for version, completions in by_version.items():
        with truth.under(folders[version]):
            worst = max(difference(truth, completion) for completion in completions)
        assert worst < 1e-3, (version, worst)
        # Under another version it would have been seen.
        with truth.under(folders[version - 1 if version else 1]):
            assert difference(truth, completions[0]) > 1e-2, version


def difference(truth: Truth, completion) -> float:
    (choice,) = completion.choices
    known = truth.logprobs([*completion.prompt_ids, *choice.token_ids])[-len(choice.token_ids) :]
    return max(abs(a - b) for a, b in zip(choice.logprobs, known, strict=True))
