"""What `strop doctor` finds out about each vLLM by asking it, as the gateway will."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway import adapters
from gateway.commands.findings import Answer, Finding, clock, doubtful, fetch, good, note, wrong
from gateway.settings import Settings
from gateway.store import Database, queries
from gateway.store.ids import new_id
from gateway.store.policy_settings import Lora

_PROMPT = "The quick brown fox jumps over the"
_COLD = 0.25
"""A temperature at which processed logprobs are unmistakably others than raw ones."""
_DTYPE_NATS = 0.005
"""Between 1e-5, measured where both compute in float32, and 0.02, where one does in bfloat16."""


def replicas(
    settings: Settings, database: Database | None, answers: dict[str, Any]
) -> Iterator[Finding]:
    """Each replica of the settings, or those that the running gateway names."""
    urls = list(settings.replicas)
    if not urls:
        urls = [one["url"] for one in answers.get("readyz", {}).get("replicas", [])]
    if not urls:
        yield note(
            "vLLM",
            "no replicas are set; `strop up` starts one with the right flags",
            "For servers of your own set STROP_REPLICAS.",
        )
    for url in urls:
        yield from _replica(url.rstrip("/").removesuffix("/v1"), settings)
    if database is not None:
        yield from _dtype(database)


def _replica(url: str, settings: Settings) -> Iterator[Finding]:
    listed = fetch(url + "/v1/models")
    if listed.status != 200 or not isinstance(listed.body, dict):
        yield wrong(
            url,
            f"it does not answer: {listed.says()}",
            "Start vLLM there, or correct STROP_REPLICAS. It takes up to a minute to start.",
        )
        return
    found = clock(url, listed.date)
    if found is not None:
        yield found
    names = [model["id"] for model in listed.body.get("data", [])]
    base = settings.vllm.served_name
    if base not in names:
        yield wrong(
            url,
            f"it serves {', '.join(names) or 'nothing'}, and not {base}",
            f"Start it with --served-model-name {base}, or set vllm.served_name.",
        )
        return
    yield good(url, f"it serves {base}")
    yield from _tokens(url, base)
    yield from _logprobs(url, base)
    yield from _loading(url, settings)


def _tokens(url: str, base: str) -> Iterator[Finding]:
    body = {
        "model": base,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": 2,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
    }
    answer = fetch(url + "/v1/chat/completions", body, timeout=120.0)
    if answer.status != 200:
        yield wrong(
            url,
            f"a chat completion is answered with {answer.status}: {answer.says()}",
            "The base model needs a chat template: a chat or instruct model has one.",
        )
        return
    choice = answer.body["choices"][0]
    if not choice.get("token_ids") or not answer.body.get("prompt_token_ids"):
        yield wrong(
            url,
            "it returns no token ids, so that nothing could be trained on",
            "Use vLLM 0.22 or newer.",
        )
    elif not (choice.get("logprobs") or {}).get("content"):
        yield wrong(url, "it returns no logprobs", "Do not start it with --max-logprobs 0.")
    else:
        yield good(url, "it returns token ids and logprobs")


def _logprobs(url: str, base: str) -> Iterator[Finding]:
    """Processed logprobs get steeper when it gets colder; raw ones stay as they are."""
    gaps = []
    for temperature in (1.0, _COLD):
        body = {
            "model": base,
            "prompt": _PROMPT,
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": 5,
            "seed": 1,
        }
        answer = fetch(url + "/v1/completions", body, timeout=120.0)
        if answer.status != 200:
            yield note(
                url,
                f"its logprobs mode cannot be told: {answer.says()}",
                "Start it with --logprobs-mode processed_logprobs and --max-logprobs 5 or more.",
            )
            return
        top = answer.body["choices"][0]["logprobs"]["top_logprobs"][0]
        values = sorted(top.values(), reverse=True)[:2]
        gaps.append(values[0] - values[1])
    # Steeper by 1 / _COLD, or not at all; the first two may be all but equally likely.
    if gaps[0] < 1e-3:
        yield note(
            url,
            "its logprobs mode cannot be told: two tokens are equally likely",
            "See that it was started with --logprobs-mode processed_logprobs.",
        )
    elif gaps[1] / gaps[0] < (1 + 1 / _COLD) / 2:
        yield wrong(
            url,
            "its logprobs are those of temperature 1, whatever was sampled with",
            "Start it with --logprobs-mode processed_logprobs.",
        )
    else:
        yield good(url, "its logprobs are those of the distribution that was sampled from")


def _loading(url: str, settings: Settings) -> Iterator[Finding]:
    """Load an adapter of each rank from the artifacts folder, and take it away again."""
    empty = fetch(url + "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
    if empty.status in (404, 405) and "adapter" not in empty.says().lower():
        yield wrong(
            url,
            "it does not take adapters while it runs",
            "Start it with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 set.",
        )
        return
    model = Path(settings.model())
    if not model.is_dir():
        yield note(
            url,
            f"{model} is no folder here, so that rank and paths cannot be tried",
            "Run it where the model lies, or set STROP_BASE_MODEL to its folder.",
        )
        return
    ranks = sorted({config.lora.rank for config in settings.policy_configs().values()})
    for rank in ranks:
        lora = next(c.lora for c in settings.policy_configs().values() if c.lora.rank == rank)
        yield from _rank(url, settings, model, lora)


def _rank(url: str, settings: Settings, model: Path, lora: Lora) -> Iterator[Finding]:
    name = new_id("strop-doctor-")
    folder = settings.artifacts() / name
    try:
        adapters.write_zero(folder, model, lora)
        loaded = fetch(
            url + "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": str(folder)},
            timeout=120.0,
        )
        yield _verdict(url, settings, lora, loaded)
        if loaded.status == 200:
            fetch(url + "/v1/unload_lora_adapter", {"lora_name": name})
    except adapters.BrokenAdapter as error:
        yield wrong(url, str(error), "Set the policy's lora.target_modules to layers that it has.")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verdict(url: str, settings: Settings, lora: Lora, loaded: Answer) -> Finding:
    said = loaded.says()
    if loaded.status == 200:
        return good(url, f"it loads adapters of rank {lora.rank} from {settings.artifacts()}")
    if "max_lora_rank" in said or "max-lora-rank" in said or "greater than" in said:
        return wrong(
            url,
            f"adapters of rank {lora.rank} are too large for it",
            f"Start it with --max-lora-rank {lora.rank}.",
        )
    if loaded.status == 404 or "No adapter found" in said:
        return wrong(
            url,
            f"it does not see {settings.artifacts()}",
            "Mount the artifacts folder there under the same path, or set STROP_ARTIFACTS_DIR to "
            "one that both see.",
        )
    return wrong(
        url,
        f"it does not load an adapter: {said}",
        "Start it with --enable-lora, and a base model that supports LoRA.",
    )


def _dtype(database: Database) -> Iterator[Finding]:
    """How far the newest published version's probe was from the trainer's numbers."""
    with database.read() as connection:
        for policy in queries.all_policies(connection):
            newest = None
            for version in queries.versions(connection, policy["project"], policy["name"]):
                for numbers in ((version["probe_result"] or {}).get("replicas") or {}).values():
                    newest = numbers.get("mean_difference", newest)
            name = policy["name"]
            if newest is None:
                yield note(
                    "dtype",
                    f"it is compared when the first version of {name} is published",
                    "Run `strop doctor` again then.",
                )
            elif newest > _DTYPE_NATS:
                yield doubtful(
                    "dtype",
                    f"vLLM's logprobs of {name} are {newest:.2g} nats from the trainer's: they "
                    "compute in different dtypes",
                    "Start vLLM with the trainer's dtype (on CPU --dtype float32).",
                )
            else:
                yield good("dtype", f"vLLM and trainer agree on {name} within {newest:.1g} nats")
