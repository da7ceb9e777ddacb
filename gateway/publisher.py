"""Makes what the replicas serve equal what the database says they should.

One loop: look at the replicas, load what is missing, prove each version on each replica with a
probe, move the alias when all have passed, take away what nothing needs any more. A replica that
restarts, or is added, is brought up to date by the same loop.
"""

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection

from gateway import adapters
from gateway.backends.vllm import Replica, ReplicaPool, ReplicaRefused, ReplicaUnavailable
from gateway.catalog import Catalog, ServedPolicy
from gateway.store import Database, policies, queries
from gateway.store.models import DEFAULT_PROJECT
from gateway.store.policy_settings import Lora
from gateway.store.writer import Writer

log = logging.getLogger("strop.publisher")

Json = dict[str, Any]

_UNLOAD_AFTER = 5.0
"""Seconds without routing to a version before it is unloaded: requests on their way arrive."""


class ProbeFailed(Exception):
    """A replica does not answer with the version that it should; carries the numbers."""

    def __init__(self, message: str, numbers: Json | None = None):
        super().__init__(message)
        self.numbers = {"error": message, **(numbers or {})}


@dataclass(slots=True)
class _Policy:
    row: Any
    versions: dict[int, Any]
    wanted: list[int] = field(default_factory=list)
    """Versions to keep loaded, the alias among them."""
    waiting: list[int] = field(default_factory=list)
    """Versions that the trainer wrote and that are not proven yet, oldest first."""

    @property
    def key(self) -> tuple[str, str]:
        return self.row["project"], self.row["name"]

    def served_name(self, number: int) -> str:
        version = self.versions[number]
        if version["adapter_path"] is None:
            return str(self.row["base_served"])
        name = f"{self.row['name']}@{number}"
        project = self.row["project"]
        return name if project == DEFAULT_PROJECT else f"{project}/{name}"


class Publisher:
    """The loop, and the catalog that it keeps up to date for the hot path."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        pool: ReplicaPool,
        *,
        poll: float,
        keep_loaded: int,
        tolerance: float,
    ):
        self._database = database
        self._writer = writer
        self._pool = pool
        self._poll = poll
        self._keep_loaded = keep_loaded
        self._tolerance = tolerance
        self._poked = asyncio.Event()
        self._turn = asyncio.Lock()
        self._checked: set[str] = set()
        self._unrouted_since: dict[str, float] = {}
        self._trouble: type[Exception] | None = None
        self.catalog = Catalog()
        self.failures: dict[tuple[str, str], Json] = {}
        """Versions whose probe failed, by project and `policy@N`."""

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            try:
                await self.reconcile()
                self._trouble = None
            except Exception as error:
                # Said once, and not at every poll of an outage.
                if type(error) is not self._trouble:
                    log.exception("publishing failed; trying again until it succeeds")
                self._trouble = type(error)
            try:
                await asyncio.wait_for(self._poked.wait(), self._poll)
            except TimeoutError:
                continue
            self._poked.clear()

    def poke(self) -> None:
        """Look again at once."""
        self._poked.set()

    async def reconcile(self) -> None:
        """One round. Afterwards the catalog is what the replicas are proven to serve."""
        async with self._turn:
            await self._pool.refresh()
            found = await asyncio.to_thread(self._read)
            for policy in found:
                for replica in self._pool.healthy:
                    await self._bring_up(policy, replica)
            self._publish_catalog(found)
            for policy in found:
                for number in policy.waiting:
                    await self._publish(policy, number)
            if any(policy.waiting for policy in found):
                found = await asyncio.to_thread(self._read)
                self._publish_catalog(found)
            await self._retire(found)

    async def restore(self, project: str, name: str, number: int) -> None:
        """Load and prove an earlier version everywhere, so that a rollback is served at once.

        Raises:
            ProbeFailed, ReplicaUnavailable, ReplicaRefused: it cannot be served.
        """
        async with self._turn:
            found = await asyncio.to_thread(self._read)
            policy = next(policy for policy in found if policy.key == (project, name))
            if not self._pool.healthy:
                raise ReplicaUnavailable("no vLLM replica is up")
            for replica in self._pool.healthy:
                await self._prove(policy, number, replica)

    def _read(self) -> list[_Policy]:
        with self._database.read() as connection:
            found = []
            for row in queries.all_policies(connection):
                listed = queries.versions(connection, row["project"], row["name"])
                versions = {version["number"]: version for version in listed}
                policy = _Policy(row, versions)
                serving = [n for n, v in versions.items() if v["state"] == "serving"]
                behind = sorted((n for n in serving if n != row["alias"]), reverse=True)
                policy.wanted = [row["alias"], *behind[: self._keep_loaded]]
                policy.waiting = [n for n, v in versions.items() if v["state"] == "ready"]
                found.append(policy)
        self.failures = {
            (policy.row["project"], f"{policy.row['name']}@{n}"): dict(v["probe_result"] or {})
            for policy in found
            for n, v in policy.versions.items()
            if v["state"] == "failed"
        }
        return found

    async def _bring_up(self, policy: _Policy, replica: Replica) -> None:
        for number in policy.wanted:
            if policy.served_name(number) in replica.proven:
                continue
            try:
                await self._prove(policy, number, replica)
            except (ProbeFailed, ReplicaRefused) as error:
                replica.error = f"{policy.row['name']}@{number}: {error}"
                log.error("%s cannot serve %s", replica.url, replica.error)
            except ReplicaUnavailable as error:
                replica.lost(str(error))
                return

    async def _publish(self, policy: _Policy, number: int) -> None:
        project, name = policy.key
        began = time.monotonic()
        results: Json = {}
        try:
            if not self._pool.healthy:
                return
            for replica in self._pool.healthy:
                results[replica.url] = await self._prove(policy, number, replica)
        except ReplicaUnavailable as error:
            log.warning("%s@%d waits: %s", name, number, error)
            return
        except (ProbeFailed, ReplicaRefused, adapters.BrokenAdapter) as error:
            numbers = error.numbers if isinstance(error, ProbeFailed) else {"error": str(error)}
            log.error("%s@%d failed: %s", name, number, error)
            await self._writer.run(lambda c: policies.failed(c, project, name, number, numbers))
            await self._unload(policy.served_name(number))
            return
        seconds = round(time.monotonic() - began, 3)
        result = {"replicas": results, "seconds": seconds, "tolerance": self._tolerance}
        moved = await self._writer.run(
            lambda c: policies.published(c, project, name, number, result)
        )
        if moved:
            log.info("%s@%d is served (%.2f s)", name, number, seconds)

    async def _prove(self, policy: _Policy, number: int, replica: Replica) -> Json:
        """Load a version on a replica and check that it answers with it; returns the numbers."""
        version = policy.versions[number]
        name = policy.served_name(number)
        if version["adapter_path"] is not None:
            await self._check(policy, version["adapter_path"])
            if name not in replica.models:
                await replica.load(name, version["adapter_path"])
        numbers: Json = {}
        probe = version["probe"]
        if probe is not None:
            served = await replica.prompt_logprobs(name, probe["token_ids"])
            numbers = compare(served, probe, self._tolerance)
        replica.proven |= {name}
        return numbers

    async def _check(self, policy: _Policy, path: str) -> None:
        if path in self._checked:
            return
        base = Path(policy.row["base_model"])
        lora = Lora(**policy.row["lora"])
        await asyncio.to_thread(adapters.check, Path(path), lora, base)
        self._checked.add(path)

    def _publish_catalog(self, found: Sequence[_Policy]) -> None:
        self.catalog = Catalog(
            {
                policy.key: ServedPolicy(
                    name=policy.row["name"],
                    alias=policy.row["alias"],
                    loaded={
                        number: policy.served_name(number)
                        for number in policy.wanted
                        if self._pool.serving(policy.served_name(number))
                    },
                    created=int(policy.row["created_at"]),
                    base_model=policy.row["base_model"],
                    sampling=policy.row["settings"].get("sampling", {}),
                    side_calls=tuple(
                        re.compile(pattern)
                        for pattern in policy.row["settings"].get("side_calls", ())
                    ),
                )
                for policy in found
            }
        )

    async def _retire(self, found: Sequence[_Policy]) -> None:
        now = time.monotonic()
        for policy in found:
            kept = {*policy.wanted, *policy.waiting}
            for number, version in policy.versions.items():
                name = policy.served_name(number)
                if number in kept or version["adapter_path"] is None:
                    self._unrouted_since.pop(name, None)
                    continue
                loaded = [r for r in self._pool.healthy if name in r.models]
                if not loaded:
                    continue
                since = self._unrouted_since.setdefault(name, now)
                if now - since < _UNLOAD_AFTER or any(name in r.in_flight_by_model for r in loaded):
                    continue
                await self._unload(name)
                await self._writer.run(partial(_mark_retired, key=policy.key, number=number))

    async def _unload(self, name: str) -> None:
        for replica in self._pool.healthy:
            if name not in replica.models:
                continue
            try:
                await replica.unload(name)
            except (ReplicaUnavailable, ReplicaRefused) as error:
                log.warning("%s did not unload %s: %s", replica.url, name, error)
        self._unrouted_since.pop(name, None)


def _mark_retired(connection: Connection, key: tuple[str, str], number: int) -> None:
    policies.retired(connection, *key, number)


def compare(served: Sequence[float], probe: Json, tolerance: float) -> Json:
    """Whether a replica's logprobs of a probe are those of the version, not of the one before.

    Args:
        served: logprobs from the replica, in nats.
        probe: `logprobs` and, where there is a version before, `previous_logprobs`, from the
            trainer's own model, of the same tokens.
        tolerance: largest mean absolute difference to `logprobs`.

    Raises:
        ProbeFailed: not finite, too far away, or no nearer than the version before.
    """
    answer = np.asarray(served, dtype=np.float64)
    wanted = np.asarray(probe["logprobs"], dtype=np.float64)
    if answer.shape != wanted.shape or not np.isfinite(answer).all():
        raise ProbeFailed("the replica's logprobs are not finite or not as many as the probe's")
    difference = np.abs(answer - wanted)
    numbers: Json = {
        "tokens": len(answer),
        "mean_difference": float(difference.mean()),
        "max_difference": float(difference.max()),
    }
    if difference.mean() > tolerance:
        raise ProbeFailed(
            f"its logprobs differ from the trainer's by {difference.mean():.2g} nats on average, "
            f"more than the tolerance of {tolerance:g}",
            numbers,
        )
    previous = probe.get("previous_logprobs")
    if previous is not None:
        before = float(np.abs(answer - np.asarray(previous, dtype=np.float64)).mean())
        numbers["mean_difference_to_previous"] = before
        # Nearer to itself than half of the way to the version before: unmistakably this one.
        if before <= 2 * difference.mean() or before == 0:
            raise ProbeFailed(
                f"its logprobs are {before:.2g} nats from the version before and "
                f"{difference.mean():.2g} from this one: the two cannot be told apart",
                numbers,
            )
    return numbers
