"""`GET /metrics`: for Prometheus.

With keys configured it needs one with the scope `read`, and shows the series of that key's project
and those of the process, which belong to no project. `STROP_ADMIN_KEY` sees all projects.
"""

import asyncio
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from gateway.auth import EVERYTHING, Principal
from gateway.gateway import Gateway, gateway_of
from gateway.telemetry import counts
from gateway.telemetry.telemetry import Telemetry

router = APIRouter(include_in_schema=False)
Strop = Annotated[Gateway, Depends(gateway_of)]


class _Shown(Collector):
    """Families, without the series of other projects."""

    def __init__(self, families: list[Metric], project: str | None):
        self._families = families
        self._project = project

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            if self._project is not None:
                family.samples = [
                    sample
                    for sample in family.samples
                    if sample.labels.get("project", self._project) == self._project
                ]
            yield family


@router.get("/metrics")
async def metrics(request: Request, gateway: Strop) -> Response:
    """Counters, gauges and histograms in Prometheus's text format."""
    telemetry: Telemetry = request.app.state.telemetry
    principal: Principal = request.scope["state"]["principal"]
    families = telemetry.process(gateway)
    if telemetry.siblings is not None:
        await asyncio.to_thread(telemetry.siblings.add, families)
    try:
        families += counts.collect(await telemetry.census(gateway.database).get())
    except Exception as error:
        # What this process knows by itself matters most while the database is away.
        families.append(telemetry.census_failed(error))
    registry = CollectorRegistry(auto_describe=False)
    project = None if principal is EVERYTHING else principal.project
    registry.register(_Shown(families, project))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
