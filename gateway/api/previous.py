"""The completion that a request continues by its id: a previous response, Anthropic's threads."""

import asyncio

from gateway.api.ids import completion_id
from gateway.capture.translate import Json, plain_message
from gateway.gateway import Gateway
from gateway.store import queries
from gateway.store.records import StoredCompletion


async def find(gateway: Gateway, name: str) -> StoredCompletion | None:
    """The completion under any of its names; None: there is none in this project."""

    def read() -> StoredCompletion | None:
        with gateway.database.read() as connection:
            return queries.completion(connection, gateway.project, completion_id(name))

    return await asyncio.to_thread(read)


def conversation(before: StoredCompletion) -> list[Json]:
    """The messages that a completion answered, and its answer."""
    choices = (before.response or {})["choices"]
    return [*before.messages, plain_message({"role": "assistant", **choices[0]["message"]})]


def in_its_trajectory(chat: Json, before: StoredCompletion) -> None:
    """Say where a request belongs: of two conversations that went alike, the id says which."""
    chat["metadata"] = {"trajectory_id": before.trajectory_id, **chat.get("metadata", {})}
