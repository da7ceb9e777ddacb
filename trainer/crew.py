"""Several processes that take one step together: `accelerate launch -m trainer`, `torchrun`.

    rank 0     claims, plans and records, as the only process does; before it loads a policy or
               takes a step it tells the others to do the same with the same inputs
    the others load, train their share of the passes, and know nothing of the database
    all        add up their gradients, and make the same optimiser step of the same adapter

Whole groups are dealt out by their different tokens, so what a group shares is still forwarded
once. Nothing is averaged: normalisers are those of the whole step, and the sum over processes is
the sum that one process would make. After every part in which one of them may fail they agree on
what came of it, so none waits for another that has given up.

The processes are found by the environment that torch's launchers set. It is taken out of it again,
so that transformers and accelerate work as in a single process: what they would synchronise at
every pass, strop synchronises once a step.
"""

import datetime
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gateway.store.claims import TrainablePolicy
from trainer.grpo import StepTrainer, Stopped
from trainer.memory import is_out_of_memory
from trainer.model import device_of
from trainer.packing import PackedStep
from trainer.settings import TrainerSettings

log = logging.getLogger("strop.trainer")

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
# Others wait for as long as rank 0 has nothing to do; one that has died is noticed at once.
_PATIENCE = datetime.timedelta(days=3650)


class Others(Exception):
    """The step was given up because another process could not go on; carries what it said."""


@dataclass(frozen=True, slots=True)
class _Load:
    policy: TrainablePolicy
    settings: TrainerSettings
    artifacts: Path


@dataclass(frozen=True, slots=True)
class _Step:
    key: tuple[str, str]
    samples: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Shares:
    key: tuple[str, str]
    samples: Sequence[Any]


class _End:
    pass


class Crew:
    """This process's place among the others."""

    def __init__(self, rank: int, size: int, sharded: bool = False):
        self.rank = rank
        self.size = size
        self.sharded = sharded
        """Whether each process holds a part of the base model's layers only (FSDP2)."""

    def tell(self, order: Any) -> None:
        """From rank 0 to the others, which wait in `follow`."""
        dist.broadcast_object_list([order], src=0)

    def hear(self) -> Any:
        """What rank 0 tells."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, mine: Any) -> list[Any]:
        """What each process gives, by rank, to all of them."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def agree(self, error: Exception | None) -> None:
        """Go on together, or not at all.

        Raises:
            the own error, or of the others': MemoryError, Stopped, Others.
        """
        said = self.gather(None if error is None else (_kind(error), str(error)))
        if error is not None:
            raise error
        for rank, trouble in enumerate(said):
            if trouble is not None:
                kind, words = trouble
                raise _KINDS[kind](f"{words} (process {rank})")

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum over all processes, in place, as one message."""
        flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        start = 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


def shard(model: nn.Module, device: str) -> None:
    """Leave a part of a base model's layers in each process; put them together as they are used.

    Frozen weights need no gradients put together, and adapters, which are made afterwards, are
    whole in every process: training, checkpoints and publishing know nothing of this.

    Args:
        model: the causal language model, on the CPU.
        device: where it is to be.
    """
    backbone = cast(Any, model).base_model
    layers = max((part for part in backbone.modules() if isinstance(part, nn.ModuleList)), key=len)
    inside = {weight for layer in layers for weight in layer.parameters()}
    whole = {weight for weight in backbone.parameters() if weight not in inside}
    for weight in model.parameters():
        if weight not in inside:
            weight.data = weight.data.to(device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # Has no weights of its own, and knows the order of the layers.
    fully_shard(backbone, mesh=mesh, ignored_params=whole)


def _kind(error: Exception) -> str:
    if is_out_of_memory(error):
        return "memory"
    return "stopped" if isinstance(error, Stopped) else "other"


_KINDS: dict[str, type[Exception]] = {"memory": MemoryError, "stopped": Stopped, "other": Others}


def join(settings: TrainerSettings) -> Crew | None:
    """Meet the other processes; None where this one was started alone.

    Before anything else touches a GPU: a process sees its own one and no other.

    Raises:
        ModelError: CUDA was asked for and there is none.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return None
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if settings.device != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        named = visible.split(",") if visible else [str(i) for i in range(local + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = named[local % len(named)]
    device = device_of(settings)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=_PATIENCE)
    for name in _LAUNCHED:
        os.environ.pop(name, None)
    # What `accelerate launch --use_fsdp` sets; accelerate itself is not to act on it.
    sharded = os.environ.pop("ACCELERATE_USE_FSDP", "").lower() == "true"
    return Crew(rank, size, sharded)


class CrewTrainer(StepTrainer):
    """A trainer that does its share of a step's passes."""

    def __init__(self, crew: Crew, **arguments: Any):
        self.crew = crew
        self.owners: list[int] = []
        """Rank that each pass of the step belongs to."""
        self._padding: list[PackedStep] | None = None
        super().__init__(**arguments)

    def passes(self, inputs: Sequence[PackedStep]) -> list[PackedStep]:
        """Those of this process."""
        if self._padding is not None:
            return self._padding
        mine = zip(inputs, self.owners, strict=True)
        return [packed for packed, owner in mine if owner == self.crew.rank]

    def training_step(
        self, model: nn.Module, inputs: list[PackedStep], num_items_in_batch: Any = None
    ) -> Tensor:
        """The own passes, then the sum of all processes' gradients."""
        error: Exception | None = None
        loss = torch.zeros((), device=self.args.device)
        try:
            if self.crew.sharded:
                self._keep_step(model, inputs, num_items_in_batch)
            loss = super().training_step(model, inputs, num_items_in_batch)
        except Exception as raised:
            if self.crew.sharded and not isinstance(raised, Stopped):
                # The others wait within a layer for this process's part of it.
                log.critical("process %d cannot go on: %s", self.crew.rank, raised)
                os._exit(1)
            error = raised
        self.crew.agree(error)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for weight in trained:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        self.crew.add_up([loss, *(cast(Tensor, weight.grad) for weight in trained)])
        self._share_metrics()
        return loss

    def _keep_step(self, model: nn.Module, inputs: list[PackedStep], tokens: Any) -> None:
        """As many passes in every process, where layers are put together in each; for nothing."""
        most = max(self.owners.count(rank) for rank in range(self.crew.size))
        missing = most - self.owners.count(self.crew.rank)
        if missing:
            self._padding = [min(inputs, key=lambda packed: len(packed.trie.input_ids))] * missing
            try:
                super().training_step(model, inputs, tokens)
            finally:
                self._padding = None
            self.model.zero_grad(set_to_none=True)
            self._seen.clear()
            self._metrics["train"].clear()

    def _share_metrics(self) -> None:
        """Every process knows of all passes, so that metrics are those of the whole step."""
        theirs = self.crew.gather((self._seen, dict(self._metrics["train"])))
        self._seen = [seen for found, _ in theirs for seen in found]
        names = sorted({name for _, metrics in theirs for name in metrics})
        for name in names:
            values = [value for _, metrics in theirs for value in metrics.get(name, [])]
            self._metrics["train"][name] = values


def deal(costs: Sequence[int], hands: int) -> list[int]:
    """Who gets what, so that the largest hand is small: the largest first, to who has least."""
    filled = [0] * hands
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = min(range(hands), key=lambda hand: (filled[hand], hand))
        filled[owners[index]] += costs[index]
    return owners


def follow(crew: Crew, resident: int) -> None:
    """What every process but rank 0 does: as it is told, until it is told to end."""
    learners: OrderedDict[tuple[str, str], Any] = OrderedDict()
    while True:
        order = crew.hear()
        if isinstance(order, _End):
            return
        try:
            if isinstance(order, _Load):
                key = order.policy.project, order.policy.name
                learners.pop(key, None)
                while len(learners) >= resident:
                    learners.popitem(last=False)
                learners[key] = _load(crew, order)
            else:
                learners.move_to_end(order.key)
                learner = learners[order.key]
                if isinstance(order, _Shares):
                    learner.effective_shares(order.samples)
                else:
                    learner.step(order.samples, lambda: False)
        except Exception as error:
            # Rank 0 has the same, or has heard of it, and says what comes next.
            log.debug("process %d: %s", crew.rank, error)


def lead(crew: Crew, policy: TrainablePolicy, settings: TrainerSettings, artifacts: Path) -> Any:
    """On rank 0: a learner whose steps all processes take."""
    order = _Load(policy, settings, artifacts)
    crew.tell(order)
    learner = _load(crew, order)
    key = policy.project, policy.name
    step_alone, shares_alone = learner.step, learner.effective_shares

    def step(samples: Sequence[Any], should_stop: Callable[[], bool]) -> Any:
        crew.tell(_Step(key, samples))
        # Layers that are put together cannot be left in the middle of a step.
        return step_alone(samples, (lambda: False) if crew.sharded else should_stop)

    def shares(samples: Sequence[Any]) -> Any:
        crew.tell(_Shares(key, samples))
        return shares_alone(samples)

    learner.step, learner.effective_shares = step, shares
    return learner


def _load(crew: Crew, order: _Load) -> Any:
    """The learner, if every process could make it."""
    from trainer.learner import Learner

    learner, error = None, None
    try:
        learner = Learner(order.policy, order.settings, order.artifacts, crew)
    except Exception as raised:
        error = raised
    crew.agree(error)
    assert learner is not None
    # What fits everywhere, or passes would be cut differently.
    learner.token_budget = min(crew.gather(learner.token_budget))
    return learner


def end(crew: Crew) -> None:
    """From rank 0: nothing more comes."""
    crew.tell(_End())
