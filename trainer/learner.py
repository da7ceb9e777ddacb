"""A policy in memory: base model, adapter, optimiser; takes steps and saves them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gateway.store.claims import TrainablePolicy
from gateway.store.fingerprint import changed
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.records import Json
from trainer import checkpoints, memory, probe
from trainer.arguments import grpo_config
from trainer.crew import Crew, CrewTrainer, deal, shard
from trainer.grpo import StepTrainer, all_finite
from trainer.logprobs import Way, choose_way
from trainer.lora_linear import speed_up
from trainer.model import ModelError, check_targets, device_of, load_base_model, lora_config
from trainer.packing import PackedStep, micro_batches, pack, row_tokens, unique_tokens
from trainer.remade import remake
from trainer.samples import ChoiceKey, Sample
from trainer.settings import TrainerSettings

log = logging.getLogger("strop.trainer")


class NotFinite(Exception):
    """A step made a number that is not finite; what it made must not be used."""


class TooLong(Exception):
    """A sample does not fit into memory by itself; it must be left out."""

    def __init__(self, tokens: int, limit: int):
        super().__init__(
            f"a sample has {tokens} tokens, and {limit} fit into one pass: longer ones are left "
            "out from now on (too_long); for longer ones set training.gradient_checkpointing to "
            "true, or STROP_TRAINER_TOKEN_BUDGET to more"
        )
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step found out."""

    metrics: dict[str, float]
    seconds: dict[str, float]
    """By phase."""
    probe: Json
    ratios: dict[ChoiceKey, float] = field(default_factory=dict)
    """Mean importance weight of each answer's tokens."""


class Learner:
    """Holds one policy at one version, and moves on from there.

    After an exception in `step` the weights are those of no version: make a new learner.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        settings: TrainerSettings,
        artifacts: Path,
        crew: Crew | None = None,
    ):
        """Load the policy at its head.

        Args:
            policy: at its head.
            settings: of the process.
            artifacts: where versions are.
            crew: the processes that take its steps together; None is this one alone.

        Raises:
            ModelError: base model or adapter cannot be used.
            TrainingSettingsError: the policy's training settings cannot be used.
        """
        self.version = policy.head
        self.identity = identity(policy)
        device = device_of(settings)
        lora = Lora.model_validate(policy.lora)
        chosen = PolicySettings.model_validate(policy.settings)
        arguments = grpo_config(
            chosen,
            checkpoints.policy_folder(artifacts, policy.project, policy.name),
            device,
        )
        arguments.learning_rate *= policy.rate_factor
        if changed(policy.base_model, policy.base_digest):
            raise ModelError(
                f"the files in {policy.base_model} are not those that {policy.name} was trained "
                "on; put them back, or make a new policy for the new base model."
            )
        place = shard if crew is not None and crew.sharded else None
        base = load_base_model(policy.base_model, settings, place)
        check_targets(base, lora)
        way = choose_way(base)
        self._crew = crew
        make = StepTrainer if crew is None else partial(CrewTrainer, crew)
        self.trainer: StepTrainer = make(
            way=way,
            model=base,
            args=arguments,
            # The seed of the arguments makes every policy begin with the same random factors.
            peft_config=lora_config(lora, policy.base_model),
        )
        speed_up(self.trainer.model)
        remake(self.trainer.model)
        memory.spare_collection(self.trainer.accelerator)
        self.trainer.recompute = chosen.old_policy == "recomputed"
        if policy.reference_path is not None:
            self.trainer.reference = checkpoints.reference(
                Path(policy.reference_path), self.trainer.model
            )
        self.device = device
        self.token_budget = settings.token_budget or memory.token_budget(
            base, way, checkpointing=bool(arguments.gradient_checkpointing)
        )
        self.optimizer_steps = 0
        self._resume(policy)
        # Other policies in this process draw from the same generator.
        self._random = torch.get_rng_state()
        log.info(
            "%s: loaded at @%d on %s%s; %s, up to %d tokens a pass",
            policy.name,
            policy.head,
            device,
            ", sharded" if place else "",
            way.value,
            self.token_budget,
        )

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
            TooLong: a sample does not fit into memory; nothing was trained.
        """
        clock = Clock()
        torch.set_rng_state(self._random)
        causal = cast(nn.Module, self.model.get_base_model())
        earlier = probe.before(causal, samples)
        clock.lap("probe_before")
        self.trainer.should_stop = should_stop
        batches, metrics = self._train(samples, clock)
        if not all_finite(self.model, metrics):
            raise NotFinite(
                f"loss {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g}: the step made "
                "numbers that are not finite; lower training.learning_rate if this happens again."
            )
        # Until TRL trains again; the probes of this step and the next need not switch it.
        self.model.eval()
        found = probe.after(causal, earlier)
        clock.lap("probe")
        self._random = torch.get_rng_state()
        self.optimizer_steps += 1
        metrics["tokens_seen"] = sum(len(b.trie.input_ids) for b in batches)
        metrics["tokens_padded"] = sum(len(s.token_ids) for s in samples)
        metrics["tokens_trained"] = sum(b.trained for b in batches)
        metrics["passes"] = len(batches)
        metrics["token_budget"] = self.token_budget
        return Stepped(metrics, clock.seconds, found, self.trainer.ratios)

    def effective_shares(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Effective sample size of each trajectory's tokens as they weigh now, as a share of them.

        Args:
            samples: all that are left of their trajectories.
        """
        cost = row_tokens if self.trainer.way is Way.PADDED else unique_tokens
        cuts = micro_batches(samples, self.token_budget, cost)
        return self.trainer.effective_shares([pack(cut, self.device) for cut in cuts])

    def _train(
        self, samples: Sequence[Sample], clock: "Clock"
    ) -> tuple[list[PackedStep], dict[str, float]]:
        """Train in passes that fit into memory: the step is the same however it is cut."""
        cost = row_tokens if self.trainer.way is Way.PADDED else unique_tokens
        longest = max(len(sample.token_ids) for sample in samples)
        random = torch.get_rng_state()
        while True:
            if longest > self.token_budget:
                raise TooLong(longest, self.token_budget)
            cuts = self._cut(samples, cost)
            batches = [pack(cut, self.device) for cut in cuts]
            clock.lap("pack")
            try:
                metrics = self.trainer.train_on(batches)
                clock.lap("train")
                return batches, metrics
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
                full, largest = str(error), max(cost(cut) for cut in cuts)
            # Outside of the handler: the error's traceback holds what filled the memory.
            self.trainer.drop_gradients(full)
            torch.set_rng_state(random)
            del batches
            memory.release()
            half = min(self.token_budget, largest) // 2
            # The longest sample is given up only when it did not fit by itself.
            self.token_budget = half if largest <= longest else max(half, longest)
            clock.lap("train")
            log.warning(
                "out of memory with %d tokens in a pass; taking the step again with at most %d",
                largest,
                self.token_budget,
            )

    def _cut(
        self, samples: Sequence[Sample], cost: Callable[[Sequence[Sample]], int]
    ) -> list[list[Sample]]:
        """Passes of the step; with several processes, whole groups are dealt out to them."""
        if self._crew is None:
            return micro_batches(samples, self.token_budget, cost)
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_id, []).append(sample)
        owners = deal([cost(group) for group in groups.values()], self._crew.size)
        cuts: list[list[Sample]] = []
        ranks: list[int] = []
        for rank in range(self._crew.size):
            hand = zip(groups.values(), owners, strict=True)
            mine = [sample for group, owner in hand if owner == rank for sample in group]
            found = micro_batches(mine, self.token_budget, cost)
            cuts += found
            ranks += [rank] * len(found)
        cast(CrewTrainer, self.trainer).owners = ranks
        return cuts

    def save(self, folder: Path, record: checkpoints.StepRecord) -> None:
        """Write what the learner holds now as a version."""
        checkpoints.save(
            folder,
            self.model,
            checkpoints.TrainingState(
                self.trainer.optimizer.state_dict(),
                self.trainer.lr_scheduler.state_dict(),
                self._random,
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
        settings.old_policy,
        policy.reference_path,
    )
