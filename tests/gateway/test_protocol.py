"""What is written in one turn of the event loop goes out in one piece."""

import asyncio
from typing import Any

import pytest

from gateway.protocol import Joined


class Transport:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed_after: int | None = None

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.closed_after = len(self.sent)

    def is_closing(self) -> bool:
        return self.closed_after is not None


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
async def joined(transport: Any) -> Joined:
    return Joined(transport, asyncio.get_running_loop())


async def test_a_head_and_its_body_are_one_piece(transport: Transport, joined: Joined):
    joined.write(b"head")
    joined.write(b"body")
    assert transport.sent == []
    await asyncio.sleep(0)
    assert transport.sent == [b"headbody"]


async def test_the_next_turn_is_a_piece_of_its_own(transport: Transport, joined: Joined):
    for part in (b"one", b"two"):
        joined.write(part)
        await asyncio.sleep(0)
    assert transport.sent == [b"one", b"two"]


async def test_a_connection_closes_after_what_was_written(transport: Transport, joined: Joined):
    joined.write(b"last")
    joined.close()
    assert (transport.sent, transport.closed_after) == ([b"last"], 1)
    assert joined.is_closing()
    await asyncio.sleep(0)
    assert transport.sent == [b"last"]


async def test_much_does_not_wait_for_the_turns_end(transport: Transport, joined: Joined):
    for _ in range(10):
        joined.write(bytes(20_000))
    # A writer that never gives the loop a turn must still be told to pause.
    assert len(b"".join(transport.sent)) >= 160_000
    await asyncio.sleep(0)
    assert len(b"".join(transport.sent)) == 200_000
