"""A policy in memory: base model, adapter, optimiser; takes steps and saves them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gateway.store.claims import TrainablePolicy
from gateway.store.fingerprint import changed
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.records import Json
from trainer import checkpoints, probe
from trainer.arguments import grpo_config
from trainer.grpo import StepTrainer, all_finite
from trainer.logprobs import choose_way
from trainer.lora_linear import speed_up
from trainer.model import ModelError, check_targets, device_of, load_base_model, lora_config
from trainer.packing import micro_batches, pack
from trainer.samples import Sample
from trainer.settings import TrainerSettings

log = logging.getLogger("strop.trainer")

_DEFAULT_BUDGET = {"cpu": 4096, "cuda": 16384}


class NotFinite(Exception):
    """A step made a number that is not finite; what it made must not be used."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step found out."""

    metrics: dict[str, float]
    seconds: dict[str, float]
    """By phase."""
    probe: Json


class Learner:
    """Holds one policy at one version, and moves on from there.

    After an exception in `step` the weights are those of no version: make a new learner.
    """

    def __init__(self, policy: TrainablePolicy, settings: TrainerSettings, artifacts: Path):
        """Load the policy at its head.

        Raises:
            ModelError: base model or adapter cannot be used.
            TrainingSettingsError: the policy's training settings cannot be used.
        """
        self.version = policy.head
        self.identity = identity(policy)
        device = device_of(settings)
        lora = Lora.model_validate(policy.lora)
        arguments = grpo_config(
            PolicySettings.model_validate(policy.settings),
            checkpoints.policy_folder(artifacts, policy.project, policy.name),
            device,
        )
        arguments.learning_rate *= policy.rate_factor
        if changed(policy.base_model, policy.base_digest):
            raise ModelError(
                f"the files in {policy.base_model} are not those that {policy.name} was trained "
                "on; put them back, or make a new policy for the new base model."
            )
        base = load_base_model(policy.base_model, settings)
        check_targets(base, lora)
        way = choose_way(base)
        self.trainer = StepTrainer(
            way=way,
            model=base,
            args=arguments,
            # The seed of the arguments makes every policy begin with the same random factors.
            peft_config=lora_config(lora, policy.base_model),
        )
        speed_up(self.trainer.model)
        self.device = device
        self.token_budget = settings.token_budget or _DEFAULT_BUDGET[device]
        self.optimizer_steps = 0
        self._resume(policy)
        log.info("%s: loaded at @%d on %s, packing %s", policy.name, policy.head, device, way.value)

    @property
    def model(self) -> Any:
        """The PEFT model."""
        return self.trainer.model

    def _resume(self, policy: TrainablePolicy) -> None:
        if policy.head_path is None:
            return
        folder = Path(policy.head_path)
        if policy.head == 0 and not policy.forked and not folder.exists():
            # Version 0 is the bare base model; its adapter is zero, wherever it is.
            return
        if checkpoints.is_untrained(folder):
            return
        checkpoints.load_adapter(folder, self.model)
        state = checkpoints.load_state(folder)
        if state is None:
            log.warning("%s: %s has no training state; new optimiser", policy.name, folder)
            return
        _restore(self.trainer.optimizer, self.trainer.lr_scheduler, state)
        torch.set_rng_state(state.random)
        self.optimizer_steps = state.optimizer_steps

    def step(self, samples: Sequence[Sample], should_stop: Callable[[], bool]) -> Stepped:
        """Take one optimiser step.

        Raises:
            NotFinite: loss, gradient or weights are not finite.
            Stopped: `should_stop` said so in time.
        """
        clock = Clock()
        batches = [pack(batch, self.device) for batch in micro_batches(samples, self.token_budget)]
        clock.lap("pack")
        causal = cast(nn.Module, self.model.get_base_model())
        earlier = probe.before(causal, samples)
        clock.lap("probe")
        self.trainer.should_stop = should_stop
        metrics = self.trainer.train_on(batches)
        clock.lap("train")
        if not all_finite(self.model, metrics):
            raise NotFinite(
                f"loss {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g}: the step made "
                "numbers that are not finite; lower training.learning_rate if this happens again."
            )
        found = probe.after(causal, earlier)
        clock.lap("probe")
        self.optimizer_steps += 1
        metrics["tokens_seen"] = sum(len(b.trie.input_ids) for b in batches)
        metrics["tokens_padded"] = sum(len(s.token_ids) for s in samples)
        metrics["tokens_trained"] = sum(b.trained for b in batches)
        metrics["passes"] = len(batches)
        return Stepped(metrics, clock.seconds, found)

    def save(self, folder: Path, record: checkpoints.StepRecord) -> None:
        """Write what the learner holds now as a version."""
        checkpoints.save(
            folder,
            self.model,
            checkpoints.TrainingState(
                self.trainer.optimizer.state_dict(),
                self.trainer.lr_scheduler.state_dict(),
                torch.get_rng_state(),
                self.optimizer_steps,
            ),
            record,
        )


def _restore(optimizer: Any, scheduler: Any, state: checkpoints.TrainingState) -> None:
    """Take over moments and counters; rates and the like stay as the settings say now."""
    chosen = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    base = list(scheduler.base_lrs)
    steps = state.scheduler["last_epoch"]
    now = [rate * factor(steps) for rate, factor in zip(base, scheduler.lr_lambdas, strict=True)]
    optimizer.load_state_dict(state.optimizer)
    scheduler.load_state_dict({**state.scheduler, "base_lrs": base, "_last_lr": now})
    for group, options, rate in zip(optimizer.param_groups, chosen, now, strict=True):
        group.update(options, lr=rate)


class Clock:
    """Seconds by phase; phases that come back add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End a phase that began with the end of the one before."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def identity(policy: TrainablePolicy) -> tuple[Any, ...]:
    """What a learner must be made anew for when it changes."""
    settings = PolicySettings.model_validate(policy.settings)
    return (
        policy.project,
        policy.name,
        policy.base_model,
        policy.rate_factor,
        repr(sorted(policy.lora.items())),
        repr(sorted(settings.training.items())),
    )
