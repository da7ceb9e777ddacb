"""One side of `benchmarks.trainer`, as a process of its own so that its memory is its own.

    python -m benchmarks.trainer_sides {log,trl,strop} FOLDER

`FOLDER/case.json` says what to run (see `benchmarks.trainer.Case`). `log` writes the episodes with
the logprobs of the model that both sides then train; the other two take the same steps on them and
write `FOLDER/{trl,strop}.json` and the first step's gradient as `FOLDER/{trl,strop}.pt`.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import trainer_log
from gateway.store.policy_settings import Lora, PolicySettings
from trainer.grpo import _no_tokens
from trainer.logprobs import Way, trained_logprobs
from trainer.model import lora_config
from trainer.packing import pack
from trainer.samples import ChoiceKey, Sample, Span
from trainer.without_vllm import GRPOConfig, GRPOTrainer

LEARNING_RATE = 1e-4
SEED = 7


def main(side: str, folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    case = json.loads((folder / "case.json").read_text())
    {"log": make_log, "trl": trl, "strop": strop}[side](folder, case)


def make_log(folder: Path, case: dict[str, Any]) -> None:
    """Make up episodes and write what a gateway would have logged of them, to `log.json`.

    An episode is a list of turns (prompt, answer); the prompt of each repeats the turn before.
    """
    model = _base(case)
    draw = np.random.default_rng(0)
    size = model.config.vocab_size

    def ids(count: int) -> list[int]:
        return [int(i) for i in draw.integers(3, size, count)]

    shared = ids(case["shared"])
    adapted = get_peft_model(model, lora_config(Lora(), ""))
    _same_weights(adapted)
    episodes = []
    for number in range(case["episodes"]):
        sequence, spans = list(shared), []
        for turn in range(case["turns"]):
            if turn:
                sequence += ids(case["between"])
            start = len(sequence)
            sequence += ids(case["answer"])
            spans.append((start, len(sequence)))
        sample = _sample(sequence, spans)
        with torch.no_grad():
            logprobs, _ = trained_logprobs(model, pack([sample]), Way.PADDED)
        logged = iter(logprobs.tolist())
        turns = [
            {
                "prompt": sequence[:start],
                "answer": sequence[start:stop],
                "logprobs": [next(logged) for _ in range(start, stop)],
            }
            for start, stop in spans
        ]
        episodes.append({"reward": (number * 5 % 8) / 8, "turns": turns})
    (folder / "log.json").write_text(json.dumps(episodes))


def trl(folder: Path, case: dict[str, Any]) -> None:
    """TRL's GRPOTrainer as it comes; its rollouts are the log, one row for every turn."""
    episodes = json.loads((folder / "log.json").read_text())
    rows = [(turn, episode["reward"]) for episode in episodes for turn in episode["turns"]]

    def rollouts(prompts: list[Any], _trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(rows)
        return {
            "prompt_ids": [turn["prompt"] for turn, _ in rows],
            "completion_ids": [turn["answer"] for turn, _ in rows],
            "logprobs": [turn["logprobs"] for turn, _ in rows],
            "worth": [reward for _, reward in rows],
        }

    def rewards(worth: list[float], **_: Any) -> list[float]:
        return worth

    from datasets import Dataset

    passes = max(1, len(rows) // 8)
    trainer = GRPOTrainer(
        model=_base(case),
        reward_funcs=[rewards],
        train_dataset=Dataset.from_dict({"prompt": ["go"]}),
        processing_class=_tokenizer(case),
        rollout_func=rollouts,
        peft_config=lora_config(Lora(), ""),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            scale_rewards=case["scale_rewards"],
            num_generations=len(rows),
            per_device_train_batch_size=len(rows) // passes,
            gradient_accumulation_steps=passes,
            max_steps=case["steps"],
            # Both sides compute in float32, or their gradients could not be compared.
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    _same_weights(trainer.model)
    watch = _Watch(folder / "trl.pt")
    trainer.add_callback(watch)
    trainer.train()
    _write(folder / "trl.json", watch)


def strop(folder: Path, case: dict[str, Any]) -> None:
    """strop's trainer over its database: claim, plan, pack, learn, probe, save, record."""
    from trainer import probe
    from trainer.settings import TrainerSettings
    from trainer.worker import Visit, Worker

    os.environ["STROP_CONFIG"] = str(folder / "none.toml")
    episodes = json.loads((folder / "log.json").read_text())
    database, policy = trainer_log.fill(
        folder,
        case["model"] or str(_tiny(folder)),
        episodes,
        copies=case["steps"],
        settings=PolicySettings(
            group_size=len(episodes),
            groups_per_step=1,
            settle_seconds=0,
            training={"learning_rate": LEARNING_RATE, "scale_rewards": case["scale_rewards"]},
        ),
    )
    worker = Worker(database, folder / "artifacts", TrainerSettings(device="cpu"))
    learner = worker._learner(policy())
    _same_weights(learner.model)
    watch = _Watch(folder / "strop.pt")
    learner.trainer.add_callback(watch)
    clock = _Parts()
    for owner, name in (
        (learner.trainer, "_compute_loss"),
        # A forward of what more than one version lies behind, here from the third step on.
        (learner.trainer, "effective_shares"),
        (learner.trainer.accelerator, "backward"),
        (learner.trainer.optimizer, "step"),
    ):
        clock.wrap(owner, name)
    proving = _Parts()
    proving.wrap(probe, "sequence_logprobs")
    for _ in range(case["steps"]):
        watch.begin()
        clock.seconds = proving.seconds = 0.0
        came = worker.visit(policy())
        watch.end()
        assert came is Visit.STEPPED, came
        rest = watch.seconds[-1] - clock.seconds
        watch.outside_with_probe.append(rest / watch.seconds[-1])
        watch.outside.append((rest - proving.seconds) / watch.seconds[-1])
    database.dispose()
    _write(folder / "strop.json", watch, way=learner.trainer.way)


class _Watch(transformers.TrainerCallback):
    """Seconds and peak memory of each step, and the gradient that the first one ended in."""

    def __init__(self, gradient: Path):
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.outside: list[float] = []
        """Share of each step that is neither forward, backward nor optimiser."""
        self.outside_with_probe: list[float] = []
        """The same, where only the loss's forward counts as one, and not those of the probe."""
        self._gradient = gradient
        self._outer = False

    def begin(self) -> None:
        self._outer = True
        self._start()

    def end(self) -> None:
        self._stop()

    def _start(self) -> None:
        self.rest = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        self._began = time.perf_counter()

    def _stop(self) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.peaks.append(_memory("VmHWM"))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        # TRL has made its rollouts and advantages by then only in its first batch; they are free.
        if not self._outer:
            self._start()

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        if not self._gradient.exists():
            parts = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
            torch.save(parts, self._gradient)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if not self._outer:
            self._stop()


class _Parts:
    """Seconds in the functions that were wrapped."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def _write(file: Path, watch: _Watch, **more: Any) -> None:
    found = {
        "seconds": watch.seconds,
        "median_seconds": statistics.median(watch.seconds),
        "peak_bytes": max(watch.peaks),
        "rest_bytes": watch.rest,
        "outside": watch.outside,
        "outside_with_probe": watch.outside_with_probe,
        **more,
    }
    file.write_text(json.dumps(found))


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _base(case: dict[str, Any]) -> Any:
    if case["model"]:
        model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
        return model.eval()
    return _tiny_model()


def _tiny_model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **special, initializer_range=0.2)).eval()


def _tiny(folder: Path) -> Path:
    _tiny_model().save_pretrained(folder / "base")
    return folder / "base"


def _tokenizer(case: dict[str, Any]) -> Any:
    return AutoTokenizer.from_pretrained(case["model"]) if case["model"] else _no_tokens()


def _same_weights(model: Any) -> None:
    """The same adapter on both sides, one that does something."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)


def _sample(sequence: list[int], spans: list[tuple[int, int]]) -> Sample:
    made = [
        Span(ChoiceKey("", index), start, stop, [0.0] * (stop - start), 0, 1.0, 0.0)
        for index, (start, stop) in enumerate(spans)
    ]
    return Sample("", "", np.array(sequence, dtype=np.int64), made)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
