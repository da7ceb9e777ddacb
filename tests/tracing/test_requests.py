"""Requests stay under what Langfuse takes, whatever is in them."""

import asyncio
import time
from typing import Any

from gateway.store import outbox
from gateway.store.writer import Writer
from tests.fake_langfuse import FakeLangfuse
from tests.store.conftest import Captured
from tests.tracing.conftest import MakeSender, drain


async def test_a_trajectory_of_very_many_completions_goes_in_requests_that_langfuse_takes(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    # Far more in every field than is reckoned with for what is around the content.
    stuffed: dict[str, Any] = {
        "status": "error",
        "client_metadata": {"x": "m" * 2_000},
        "request": {"model": "agent", "stop": "s" * 20_000, "tool_choice": {"x": "c" * 450}},
        "sampling": {f"option_{n}": "o" * 500 for n in range(40)},
        "response": {"error": {"message": "e" * 2_000}},
        "messages": [{"role": "user", "content": "q" * 3_000}],
    }
    items = [
        captured("t", created_at=1000.0 + n, finished_at=1000.5 + n, **stuffed) for n in range(1500)
    ]
    for start in range(0, len(items), 100):
        await asyncio.gather(*(writer.store(item) for item in items[start : start + 100]))
    await drain(make_sender())
    # The receiver refuses what is too large, and says so when the test ends.
    with writer._database.read() as connection:
        (lag,) = outbox.lag(connection, time.time())
    assert (lag.waiting, lag.refused) == (0, 0)
    sent = {s.metadata["completion_id"] for s in langfuse.spans.values() if s.parent_id}
    assert sent == {item.id for item in items}
    assert langfuse.requests["traces"] > len(items) / 200
    whole = langfuse.generation(items[0].id).get("model.parameters")
    assert whole["stop"].endswith("…")
    assert max(len(str(value)) for value in whole.values()) == 500
