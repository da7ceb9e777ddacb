"""`/healthz` (is the process alive) and `/readyz` (would a request be answered, and if not why)."""

import asyncio
import os
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from sqlalchemy import text
from starlette.responses import Response

from gateway.api.replicas import replica_json
from gateway.errors import json_response
from gateway.gateway import Gateway, gateway_of

router = APIRouter(tags=["health"])
Strop = Annotated[Gateway, Depends(gateway_of)]


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "Not ready; the body says why"}})
async def readyz(request: Request, gateway: Strop) -> Response:
    """Whether every policy of the key's project is served, and what is wrong if one is not.

    One that the replicas cannot serve as they are, while others are served, is only warned of: it
    waits for somebody to mend it, and must not take the others out of rotation.

    Without a key that may read: whether those of the project `default` are, and none by name.
    """
    named = "principal" in request.scope.get("state", {})
    problems: list[str] = []
    warnings: list[str] = []

    def ask_database() -> None:
        with gateway.database.read() as connection:
            connection.execute(text("SELECT 1"))

    try:
        await asyncio.to_thread(ask_database)
    except Exception as error:
        # With a journal, requests are answered and logged all the same.
        away = problems if gateway.writer.journal is None else warnings
        away.append(f"the database does not answer: {error}")
    catalog = gateway.publisher.catalog
    replicas = [
        {
            "url": replica.url,
            "healthy": replica.healthy,
            "error": replica.error,
            "serves": replica_json(gateway, replica)["serves"] if named else [],
            "in_flight": replica.in_flight,
        }
        for replica in gateway.pool.replicas
    ]
    if not replicas:
        problems.append("no vLLM replica is configured: set STROP_REPLICAS or run `strop up`")
    elif not gateway.pool.healthy:
        problems.append("no vLLM replica answers")
    served = catalog.of(gateway.project)
    blocked = gateway.publisher.blocked
    absent = [p for p in served if p.alias not in p.loaded]
    if len(absent) < len(served):
        absent = [p for p in absent if (gateway.project, p.name) not in blocked]
    if named:
        problems += [f"{p.name}@{p.alias} is not loaded on any replica" for p in absent]
    elif absent:
        problems.append("a policy is not loaded on any replica; a key that may read is told which")
    if not served:
        problems.append("there is no policy yet")
    mine = gateway.project if named else None
    warnings += [why for (project, _), why in blocked.items() if project == mine]
    journal = gateway.writer.journal
    body: dict[str, Any] = {
        "ready": not problems,
        "problems": problems,
        "warnings": warnings,
        "policies": {
            policy.name: {
                "alias": policy.alias,
                "loaded": sorted(policy.loaded),
                "canary": policy.canary,
                "canary_share": policy.canary_share if policy.canary is not None else None,
            }
            for policy in (served if named else ())
        },
        "failed_versions": {
            name: failure
            for (project, name), failure in gateway.publisher.failures.items()
            if project == mine
        },
        "replicas": replicas,
        # Of several on this port, the one that answered this.
        "process": {"id": os.getpid(), "publishes": gateway.publisher.publishes()},
        # What waits for PostgreSQL to come back; requests are answered all the same.
        "journal": journal.state() if journal is not None else None,
    }
    return json_response(body, 503 if problems else 200, {"retry-after": "2"} if problems else None)
