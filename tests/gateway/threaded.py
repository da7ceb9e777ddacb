"""A gateway in a thread of its own, for clients that block, and for those that are processes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gateway.conftest import Running, running, write_toy_base


@contextmanager
def in_a_thread(folder: Path, **options: Any) -> Iterator[Running]:
    """A gateway, ready, in front of a fake vLLM; `options` are its settings."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gateway", daemon=True)
    thread.start()

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    parts = running(folder, write_toy_base(folder), **options)
    try:
        yield wait(parts.__aenter__())
    finally:
        wait(parts.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
