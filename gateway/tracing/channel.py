"""One project's exchange with its Langfuse, by whichever process holds its lease."""

import logging
import threading
import time
from collections.abc import Callable

from gateway.store import leases
from gateway.tracing.exporter import Exporter
from gateway.tracing.pace import Pace
from gateway.tracing.poller import Poller
from gateway.tracing.sender import Sender
from gateway.tracing.settings import LangfuseSettings
from gateway.tracing.writes import Writes, lower_priority

log = logging.getLogger("strop.langfuse")

_LEASE_SECONDS = 60.0
"""Longer than a step takes, however slowly Langfuse answers."""

_NOTE_SECONDS = 3600.0
"""Between two notes in the database that the project is traced."""


class Channel:
    """Runs in a thread of its own until told to stop, and then drains the outbox."""

    def __init__(
        self,
        writes: Writes,
        project: str,
        settings: LangfuseSettings,
        public_url: str,
        stop: threading.Event,
        pace: Pace | None = None,
    ):
        """
        Args:
            pace: how fast to send until `stop` is set; None: as fast as it goes.
        """
        self._writes = writes
        self._settings = settings
        self._stop = stop
        self._pace = pace
        self._owner = leases.new_owner()
        self._name = f"langfuse/{project}"
        self._held_until = 0.0
        self._note_at = 0.0
        config = settings.projects[project]
        self._exporter = Exporter(config, settings.environment, settings.timeout)
        self.sender = Sender(writes, project, self._exporter, public_url)
        self.poller = Poller(writes, project, self._exporter, settings)

    def run(self) -> None:
        """Send until `stop` is set, then for up to `drain_seconds` more."""
        lower_priority()
        while not self._stop.is_set():
            busy = self._forever(self._step)
            if not busy:
                self._stop.wait(self._settings.send_seconds)
            elif self._pace is not None:
                self._pace.wait(self._stop, self.sender.oldest)
        self._drain()
        self._exporter.close()

    def _forever(self, step: Callable[[], object]) -> object:
        # The database may be away, and whatever else happens: traces are late then, not lost.
        try:
            return step()
        except Exception:
            log.exception("sending to Langfuse failed; trying again")
            self._stop.wait(2.0)
            return None

    def _step(self) -> bool:
        if not self._hold():
            self._stop.wait(2.0)
            return False
        busy = self.sender.step() > 0
        self.poller.step()
        return busy

    def _hold(self) -> bool:
        now = time.monotonic()
        if now < self._held_until:
            return True
        held = self._writes.run(
            lambda c: leases.take(c, self._name, self._owner, _LEASE_SECONDS, time.time())
        )
        self._held_until = now + _LEASE_SECONDS / 4 if held else 0.0
        if held and now >= self._note_at:
            self.sender.start()
            self._note_at = now + _NOTE_SECONDS
        return held

    def _drain(self) -> None:
        until = time.monotonic() + self._settings.drain_seconds
        sender = self.sender
        sender.not_before, sender.failures = 0.0, 0
        try:
            # Two attempts: where Langfuse is away nobody waits for it now.
            while self._hold() and time.monotonic() < until and sender.failures < 2:
                if sender.step() == 0 and sender.failures == 0:
                    break
                time.sleep(max(0.0, min(sender.not_before - time.monotonic(), 1.0)))
            self._writes.run(lambda c: leases.give_back(c, self._name, self._owner))
        except Exception:
            log.exception("the rest is sent to Langfuse after the next start")
