"""Models and logs small enough to train on in a fraction of a second."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model_state_dict
from sqlalchemy import update
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gateway.store import Database, claims, policies, queries
from gateway.store.models import Group, Policy
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.records import CapturedChoice, CapturedCompletion, TrajectoryRef
from gateway.store.rewards import NewReward, post
from gateway.store.writer import Writer
from trainer.samples import ChoiceKey, Sample, Span

VOCAB = 200
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}


def model(kind: str = "llama", seed: int = 0, spread: float = 0.25, **extra: Any) -> Any:
    """A random model in which attention and positions matter: weights far from 0."""
    config, cls, more = KINDS[kind]
    torch.manual_seed(seed)
    return cls(
        config(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=spread,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **more,
            **extra,
        )
    ).eval()


def ids(generator: np.random.Generator, length: int) -> list[int]:
    return generator.integers(3, VOCAB, length).tolist()


@torch.no_grad()
def logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0):
    """Logprobs of an answer as vLLM logs them."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    logs = torch.log_softmax(logits.float() / temperature, -1)
    return logs.gather(1, torch.tensor(answer)[:, None]).squeeze(1).tolist()


def sample(
    parts: Sequence[tuple[str, Sequence[int]]],
    *,
    advantage: float = 1.0,
    group: str = "g",
    temperature: float = 1.0,
    name: str = "t",
    logged: float = -5.0,
) -> Sample:
    """A sample out of ("context" | "sampled", ids) parts, its logprobs all `logged`."""
    tokens: list[int] = []
    spans = []
    for kind, part in parts:
        start = len(tokens)
        tokens.extend(part)
        if kind == "sampled":
            spans.append(
                Span(
                    ChoiceKey(f"{name}-{len(spans)}", 0),
                    start,
                    len(tokens),
                    [logged] * len(part),
                    0,
                    temperature,
                    advantage,
                )
            )
    return Sample(name, group, np.array(tokens, dtype=np.int64), spans)


def forked_samples(seed: int = 0) -> list[Sample]:
    """Two groups over one system prompt, several turns, forks inside answers, one duplicate."""
    draw = np.random.default_rng(seed)
    system, first, second = ids(draw, 11), ids(draw, 5), ids(draw, 4)
    answer, tail = ids(draw, 6), ids(draw, 4)
    result = [
        sample([("context", system + first), ("sampled", answer)], advantage=0.7, name="a"),
        sample(
            [("context", system + first), ("sampled", [*answer[:3], *ids(draw, 5)])],
            advantage=-0.4,
            name="b",
        ),
        sample(
            [
                ("context", system + first),
                ("sampled", answer),
                ("context", tail),
                ("sampled", ids(draw, 3)),
            ],
            advantage=1.1,
            name="c",
        ),
        sample(
            [("context", system + second), ("sampled", ids(draw, 7))],
            advantage=-1.3,
            group="h",
            name="d",
        ),
        sample(
            [("context", system + second), ("sampled", ids(draw, 2))],
            advantage=0.9,
            group="h",
            name="e",
            temperature=0.7,
        ),
    ]
    return [*result, result[0]]


@dataclass
class Turn:
    """A completion to be logged."""

    prompt: list[int]
    answers: list[list[int]]
    logprobs: list[list[float]] | None = None
    version: int | None = 0
    reason: str | None = None
    status: str = "complete"
    policy: str = "agent"
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})


class Log:
    """A trajectory database with one policy, filled the way the gateway fills it."""

    def __init__(self, folder: Path, base: Path | str, **settings: Any):
        self.url = f"sqlite:///{folder / 'strop.db'}"
        self.artifacts = folder / "artifacts"
        self.database = Database(self.url)
        self.database.migrate()
        self.base = base
        self._count = 0
        self._batch: tuple[list[CapturedCompletion], list[NewReward]] | None = None
        defaults = {"group_size": 2, "groups_per_step": 1, "settle_seconds": 0}
        with self.database.write() as connection:
            policies.create(
                connection,
                "default",
                "agent",
                base_model=str(base),
                base_served="base",
                lora=Lora(rank=8),
                settings=PolicySettings(**{**defaults, **settings}),
                adapter_path=None,
            )

    def add(
        self,
        group: str,
        trajectory: str,
        turns: Sequence[Turn],
        *,
        parent: str | None = None,
        task: str | None = None,
        **reward: float,
    ) -> list[str]:
        """Log an episode; keyword arguments are rewards of the trajectory, by their names."""
        names = []
        now = time.time()
        captured = []
        for turn in turns:
            self._count += 1
            names.append(f"c{self._count}")
            logs = turn.logprobs or [[-5.0] * len(answer) for answer in turn.answers]
            captured.append(
                CapturedCompletion(
                    id=names[-1],
                    project="default",
                    trajectory=TrajectoryRef(
                        trajectory, group, "path", parent_id=parent, task=task
                    ),
                    policy=turn.policy,
                    version=turn.version,
                    trained=True,
                    messages=[],
                    request={},
                    stream=False,
                    created_at=now + self._count * 1e-4,
                    sampling=turn.sampling,
                    status=turn.status,
                    reason=turn.reason,
                    prompt_ids=turn.prompt or None,
                    prompt_tokens=len(turn.prompt),
                    completion_tokens=sum(map(len, turn.answers)),
                    choices=[
                        CapturedChoice(i, "stop", answer, logs[i], os.urandom(16))
                        for i, answer in enumerate(turn.answers)
                    ],
                    finished_at=now,
                )
            )
        rewards = [
            NewReward(reward=value, name=name, trajectory_id=trajectory)
            for name, value in reward.items()
        ]
        if self._batch is not None:
            self._batch[0].extend(captured)
            self._batch[1].extend(rewards)
        else:
            self._write(captured, rewards)
        return names

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Store what is added in the block at its end, which is much quicker."""
        self._batch = ([], [])
        yield
        batch, self._batch = self._batch, None
        self._write(*batch)

    def _write(self, captured: list[CapturedCompletion], rewards: list[NewReward]) -> None:
        asyncio.run(self._store(captured))
        with self.database.write() as connection:
            for reward in rewards:
                post(connection, "default", [reward])

    async def _store(self, captured: list[CapturedCompletion]) -> None:
        writer = Writer(self.database)
        writer.start()
        await asyncio.gather(*map(writer.store, captured))
        await writer.close()

    def reward(self, value: float, **target: Any) -> None:
        with self.database.write() as connection:
            post(connection, "default", [NewReward(reward=value, **target)])

    def episodes(
        self,
        model: Any,
        group: str,
        rewards: Sequence[float | None],
        seed: int = 0,
        length: int = 4,
        policy: str = "agent",
    ) -> None:
        """One-turn episodes of one task with the model's own logprobs."""
        draw = np.random.default_rng(seed)
        prompt = ids(draw, 12)
        for number, reward in enumerate(rewards):
            answer = ids(draw, length)
            turn = Turn(prompt, [answer], [logprobs(model, prompt, answer)], policy=policy)
            scores = {} if reward is None else {"reward": reward}
            self.add(group, f"{group}-{number}", [turn], **scores)

    @property
    def policy(self) -> claims.TrainablePolicy:
        return claims.trainable_policies(self.database)[0]

    @property
    def settings(self) -> PolicySettings:
        return PolicySettings.model_validate(self.policy.settings)

    def claim(self, worker: str = "w", limit: int = 10, lease: float = 60) -> list[Any]:
        s = self.settings
        return claims.claim_groups(
            self.database,
            self.policy,
            worker,
            limit=limit,
            group_size=s.group_size,
            settle_seconds=s.settle_seconds,
            deadline_seconds=s.deadline_seconds,
            lease_seconds=lease,
        )

    def close_group(self, group: str) -> None:
        with self.database.write() as connection:
            connection.execute(update(Group).where(Group.id == group).values(closed_at=time.time()))

    def move_head(self, head: int) -> None:
        with self.database.write() as connection:
            connection.execute(update(Policy).values(head=head))

    def trajectory(self, trajectory: str) -> Any:
        with self.database.read() as connection:
            return queries.trajectory(connection, "default", trajectory)

    def states(self) -> dict[str, tuple[str, str | None]]:
        """State and reason of every trajectory."""
        rows = self.rows("select id, state, reason from trajectories")
        return {row[0]: (row[1], row[2]) for row in rows}

    def rows(self, query: str) -> list[Any]:
        with self.database.read() as connection:
            return list(connection.exec_driver_sql(query))


def same_weights(one: Any, other: Any) -> bool:
    """Whether two PEFT models hold the same adapter, bit for bit."""
    left, right = get_peft_model_state_dict(one), get_peft_model_state_dict(other)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
