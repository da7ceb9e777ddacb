"""Running baselines: what a policy's rewards have been, and those of its tasks.

They are what a task that is seen once is compared with. Each is an exponentially weighted mean and
variance, so that it follows a policy that gets better.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select
from sqlalchemy.orm import Mapped, mapped_column

from gateway.store.base import insert_into
from gateway.store.models import Base

FADE = 0.02
"""Weight of the newest reward, once there are enough: about the last fifty count."""


class Baseline(Base):
    """Running mean and variance of a policy's rewards, and of those of single tasks."""

    __tablename__ = "baselines"

    project: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(primary_key=True)
    task: Mapped[str] = mapped_column(primary_key=True)
    """Empty for the policy as a whole."""
    mean: Mapped[float]
    variance: Mapped[float]
    count: Mapped[int]
    """Rewards that went into it; old ones fade."""
    updated_at: Mapped[float]


@dataclass(frozen=True, slots=True)
class Running:
    """A running baseline as it stands: mean and variance of rewards, and how many there were."""

    mean: float
    variance: float
    count: int

    def after(self, reward: float) -> "Running":
        """What it becomes with one more reward: a plain average first, then one that fades."""
        share = max(1 / (self.count + 1), FADE)
        apart = reward - self.mean
        return Running(
            self.mean + share * apart,
            (1 - share) * (self.variance + share * apart * apart),
            self.count + 1,
        )


NOTHING = Running(0.0, 0.0, 0)


def read(connection: Connection, project: str, policy: str, task: str) -> Running:
    """A baseline of a policy; of the policy as a whole where `task` is empty."""
    return read_all(connection, project, policy, [task]).get(task, NOTHING)


_OF_TASKS = select(Baseline.task, Baseline.mean, Baseline.variance, Baseline.count).where(
    Baseline.project == bindparam("of_project"),
    Baseline.policy == bindparam("of_policy"),
    Baseline.task.in_(bindparam("tasks", expanding=True)),
)


def read_all(
    connection: Connection, project: str, policy: str, tasks: Sequence[str]
) -> dict[str, Running]:
    """Those of the baselines that there are, by task."""
    values = {"of_project": project, "of_policy": policy, "tasks": list(tasks)}
    return {row[0]: Running(*row[1:]) for row in connection.execute(_OF_TASKS, values)}


def learn(
    connection: Connection,
    project: str,
    policy: str,
    scores: Sequence[tuple[str | None, float]],
    now: float,
) -> None:
    """Let rewards of tasks into the baselines of their tasks and of the policy.

    Args:
        scores: task, or None where a reward is the policy's alone, and reward.
    """
    by_task: dict[str, list[float]] = {}
    for task, score in scores:
        by_task.setdefault("", []).append(score)
        if task:
            by_task.setdefault(task, []).append(score)
    for task in sorted(by_task):
        running = read(connection, project, policy, task)
        for score in by_task[task]:
            running = running.after(score)
        values = {
            "mean": running.mean,
            "variance": running.variance,
            "count": running.count,
            "updated_at": now,
        }
        connection.execute(
            insert_into(connection, Baseline)
            .values(project=project, policy=policy, task=task, **values)
            .on_conflict_do_update(index_elements=["project", "policy", "task"], set_=values)
        )
