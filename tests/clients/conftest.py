"""One gateway in front of a toy that plays a tool agent, for all the clients of this folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import select

from gateway.gateway import Gateway
from gateway.store import queries
from gateway.store.models import Trajectory
from gateway.store.records import StoredCompletion, StoredTrajectory
from tests.fake_vllm import FakeVllm
from tests.gateway.threaded import in_a_thread

QUESTIONS = ("What colour is the fence?", "And the door?")
"""What the user says in an episode; the toy calls both tools after each, and then answers."""


def look_up(thing: str) -> str:
    """Look up the colour of a thing."""
    return f"{thing} is navy"


def count(colour: str, times: int) -> str:
    """Count things of a colour."""
    return str(times * len(colour))


TOOLS = {"look_up": look_up, "count": count}
PARAMETERS: dict[str, dict[str, Any]] = {
    "look_up": {
        "type": "object",
        "properties": {"thing": {"type": "string"}},
        "required": ["thing"],
        "additionalProperties": False,
    },
    "count": {
        "type": "object",
        "properties": {"colour": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["colour", "times"],
        "additionalProperties": False,
    },
}
CHAT_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": tool.__doc__, "parameters": PARAMETERS[name]},
    }
    for name, tool in TOOLS.items()
]


@dataclass
class Episode:
    """What came out of what a client did."""

    trajectories: list[StoredTrajectory] = field(default_factory=list)

    @property
    def completions(self) -> list[StoredCompletion]:
        """Those of the only trajectory, in their order."""
        (trajectory,) = self.trajectories
        return trajectory.completions

    def is_agent(self, turns: int = 6, *, reason: str | None = None, **expected: Any) -> None:
        """It is one trajectory with one thread of so many turns, token by token.

        Args:
            turns: of the agent; six are two questions, each with two tool calls and an answer.
            reason: why it is not trained on.
            expected: attributes that each completion has.
        """
        assert len(self.trajectories) == 1, self.histories()
        (trajectory,) = self.trajectories
        assert trajectory.policy == "agent"
        assert trajectory.group_id.startswith("task-")
        assert trajectory.attribution == "new"
        completions = trajectory.completions
        assert len(completions) == turns
        for completion in completions:
            assert_tokens(completion, reason)
            for name, value in expected.items():
                assert getattr(completion, name) == value, name
        assert completions[0].parent_id is None
        for before, after in pairwise(completions):
            assert after.parent_id == before.id, "the echo was not taken for a continuation"
            assert_extends(before, after)

    def histories(self) -> list[Any]:
        """What was asked, for the message of a test that fails."""
        return [[c.messages for c in t.completions] for t in self.trajectories]


def assert_tokens(completion: StoredCompletion, reason: str | None = None) -> None:
    """Ids, logprobs and usage agree in number."""
    assert (completion.status, completion.reason) == ("complete", reason)
    assert completion.served_model == "agent@0"
    assert completion.prompt_ids is not None
    assert len(completion.prompt_ids) == completion.prompt_tokens
    sampled = 0
    for choice in completion.choices:
        assert choice.token_ids is not None
        assert choice.logprobs is not None
        assert len(choice.token_ids) == len(choice.logprobs) > 0
        sampled += len(choice.token_ids)
    assert sampled == completion.completion_tokens


def assert_extends(before: StoredCompletion, after: StoredCompletion) -> None:
    """A prompt begins with the prompt and the answer of the turn before."""
    assert before.prompt_ids is not None
    assert after.prompt_ids is not None
    sequence = before.prompt_ids + (before.choices[0].token_ids or [])
    assert after.prompt_ids[: len(sequence)] == sequence


@dataclass
class Served:
    """The gateway that clients are tried on."""

    url: str
    gateway: Gateway
    vllm: FakeVllm

    @property
    def v1(self) -> str:
        """What is set as the base URL of an OpenAI client."""
        return self.url + "/v1"

    @contextmanager
    def episode(self) -> Iterator[Episode]:
        """Collects the trajectories that come into being inside it."""
        before, found = self._ids(), Episode()
        yield found
        with self.gateway.database.read() as connection:
            for name in self._ids():
                if name not in before:
                    trajectory = queries.trajectory(connection, "default", name)
                    assert trajectory is not None
                    found.trajectories.append(trajectory)

    def _ids(self) -> list[str]:
        with self.gateway.database.read() as connection:
            found = select(Trajectory.id).order_by(Trajectory.created_at)
            return list(connection.execute(found).scalars())


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The gateway, until the end of the session."""
    with in_a_thread(tmp_path_factory.mktemp("clients")) as strop:
        yield Served(strop.url, strop.gateway, strop.vllm)


@pytest.fixture
def strop(served: Served) -> Iterator[Served]:
    """The gateway, with nothing left of what the test before told the toy to do."""
    served.vllm.thoughts, served.vllm.cached_tokens = "", None
    yield served
    served.vllm.faults.__init__()  # type: ignore[misc]
    served.vllm.thoughts, served.vllm.cached_tokens = "", None
