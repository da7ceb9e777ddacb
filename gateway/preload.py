"""LiteLLM, imported before the first request needs it: that takes seconds.

Importing runs in a thread and takes turns with the event loop, which may have to wait a switch
interval (5 ms) for each of its turns. For as long as it lasts the interval is shorter, so that
requests wait less.
"""

import asyncio
import logging
import sys
import time
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
        log.warning("LiteLLM is to be imported, and is not installed")
        return
    began, before = time.monotonic(), sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        for module in (translate_responses.MODULE, translate_messages.MODULE):
            await translate.litellm(module)
    except Exception:
        # The first request that needs it says what is wrong.
        log.exception("LiteLLM could not be imported")
    finally:
        sys.setswitchinterval(before)
    log.info("LiteLLM was imported in %.1f s", time.monotonic() - began)
