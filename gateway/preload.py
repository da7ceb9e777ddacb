"""LiteLLM, imported before the first request needs it: that takes seconds.

Importing runs in a thread and takes turns with the event loop. What holds requests up meanwhile is
little (measured: 27 ms at most, 3 ms in 99 of 100 looks), because of two things:

- The event loop may have to wait a switch interval (5 ms) for each of its turns. For as long as it
  lasts the interval is shorter.
- So many objects are made that the collector looks at all there are, several times, and nothing
  else runs while it does (75 ms each; 250 ms with its usual thresholds). It pauses, and what was
  imported is kept out of its sight afterwards too.

Another process could import, and would have to translate there as well.
"""

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from gateway.capture import translate, translate_messages, translate_responses

log = logging.getLogger("strop.preload")

_AFTER_SECONDS = 1.0
"""The gateway gets ready first."""

_SWITCH_SECONDS = 0.0005


async def litellm() -> None:
    """Import what Responses, Messages and providers need; if it is not installed, nothing."""
    await asyncio.sleep(_AFTER_SECONDS)
    if find_spec("litellm") is None:
        # The first request that needs it says how to install it.
        log.info("LiteLLM is not installed: no Responses, no Messages, no providers")
        return
    began = time.monotonic()
    try:
        with _considerate():
            for module in (translate_responses.MODULE, translate_messages.MODULE):
                await translate.litellm(module)
    except Exception:
        # The first request that needs it says what is wrong.
        log.exception("LiteLLM could not be imported")
        return
    log.info("LiteLLM was imported in %.1f s", time.monotonic() - began)


@contextmanager
def _considerate() -> Iterator[None]:
    """While another thread makes many objects that stay, let the event loop have its turns."""
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
        sys.setswitchinterval(interval)
