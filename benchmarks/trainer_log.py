"""Episodes with known rewards, put into a trajectory database the way the gateway does it."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.store import Database, claims, policies
from gateway.store.claims import TrainablePolicy
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.records import CapturedChoice, CapturedCompletion, TrajectoryRef
from gateway.store.rewards import NewReward, post
from gateway.store.writer import Writer


def fill(
    folder: Path,
    base_model: str,
    episodes: list[dict[str, Any]],
    *,
    copies: int,
    settings: PolicySettings,
) -> tuple[Database, Callable[[], TrainablePolicy]]:
    """A database with one policy and `copies` groups of the same episodes; what reads the policy.

    Args:
        episodes: `reward` and `turns`, each with `prompt`, `answer` and `logprobs`.
    """
    database = Database(f"sqlite:///{folder / 'strop.db'}")
    database.migrate()
    with database.write() as connection:
        policies.create(
            connection,
            "default",
            "agent",
            base_model=base_model,
            base_served="base",
            lora=Lora(),
            settings=settings,
            adapter_path=None,
        )
    asyncio.run(_store(database, episodes, copies))
    with database.write() as connection:
        rewards = [
            NewReward(reward=episode["reward"], trajectory_id=f"{copy}-{number}")
            for copy in range(copies)
            for number, episode in enumerate(episodes)
        ]
        post(connection, "default", rewards)
    return database, lambda: claims.trainable_policies(database)[0]


async def _store(database: Database, episodes: list[dict[str, Any]], copies: int) -> None:
    writer = Writer(database)
    writer.start()
    now = time.time()
    for copy in range(copies):
        for number, episode in enumerate(episodes):
            for index, turn in enumerate(episode["turns"]):
                answer = turn["answer"]
                await writer.store(
                    CapturedCompletion(
                        id=f"c-{copy}-{number}-{index}",
                        project="default",
                        trajectory=TrajectoryRef(f"{copy}-{number}", f"group-{copy}", "path"),
                        policy="agent",
                        version=0,
                        trained=True,
                        messages=[],
                        request={},
                        stream=False,
                        created_at=now + copy + index * 1e-4,
                        sampling={"temperature": 1.0},
                        status="complete",
                        reason=None,
                        prompt_ids=turn["prompt"],
                        prompt_tokens=len(turn["prompt"]),
                        completion_tokens=len(answer),
                        choices=[
                            CapturedChoice(0, "stop", answer, turn["logprobs"], os.urandom(16))
                        ],
                        finished_at=now,
                    )
                )
    await writer.close()
