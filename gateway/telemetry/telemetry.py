"""All that listens to the requests of one gateway: counters, the request log, spans."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.gateway import Gateway
from gateway.settings import Settings
from gateway.store import Database
from gateway.store.census import Census, take
from gateway.telemetry import state
from gateway.telemetry.counters import Counters
from gateway.telemetry.observation import Observation
from gateway.telemetry.remembered import Remembered
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.siblings import Siblings
from gateway.telemetry.spans import Spans

log = logging.getLogger("strop.telemetry")

_CENSUS_SECONDS = 10.0


class Telemetry:
    """Built with the application; told of each request when it is over."""

    def __init__(self, settings: Settings):
        self.counters = Counters()
        self._log = RequestLog(settings.log_format) if settings.request_log else None
        self._spans = Spans() if settings.otel else None
        self.siblings: Siblings | None = None
        self._census: Remembered[Census] | None = None

    def tell(self, seen: Observation) -> None:
        """Count it, log it, trace it. What goes wrong with that is no matter of the request."""
        try:
            self.counters.add(seen)
            if self._log is not None:
                self._log.add(seen)
            if self._spans is not None:
                self._spans.add(seen)
        except Exception:
            log.exception("a request was not told about")

    def census(self, database: Database) -> Remembered[Census]:
        """The counts over the whole database, taken now and then."""
        if self._census is None:

            def ask() -> Census:
                with database.read() as connection:
                    return take(connection)

            self._census = Remembered(ask, _CENSUS_SECONDS)
        return self._census

    def census_failed(self, error: Exception) -> Metric:
        """What stands in the metrics instead."""
        log.warning("the database was not counted for the metrics: %s", error)
        return GaugeMetricFamily("strop_database_up", "1: the database answers", value=0)

    def process(self, gateway: Gateway) -> list[Metric]:
        """What this process counts and sees by itself."""
        return [*self.counters.collect(), *state.collect(gateway)]

    @asynccontextmanager
    async def running(self, gateway: Gateway) -> AsyncIterator[None]:
        """Share the counts with the processes beside this one; at the end write what waits."""
        task = None
        if gateway.settings.workers > 1:
            collect = partial(self.process, gateway)
            self.siblings = Siblings(gateway.settings.data_dir, collect)
            task = asyncio.create_task(self.siblings.run())
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Write and send what waits."""
        if self._log is not None:
            self._log.flush()
        if self._spans is not None:
            self._spans.close()
