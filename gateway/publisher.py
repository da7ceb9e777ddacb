"""Makes what the replicas serve equal what the database says they should.

One loop: look at the replicas, load what is missing, prove each version on each replica with a
probe, move the alias when all have passed, take away what nothing needs any more. A replica that
restarts, or is added, is brought up to date by the same loop.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from gateway import adapters
from gateway.backends.vllm import Replica, ReplicaPool, ReplicaRefused, ReplicaUnavailable
from gateway.catalog import Catalog, ServedPolicy
from gateway.proofs import ProbeFailed, compare
from gateway.store import Database, drains, policies, queries, trials
from gateway.store.models import DEFAULT_PROJECT
from gateway.store.policy_settings import Lora
from gateway.store.writer import Writer

log = logging.getLogger("strop.publisher")

Json = dict[str, Any]

_GLANCE = 0.1
"""Seconds between two looks for a version that the trainer has just written."""

_UNLOAD_AFTER = 5.0
"""Seconds without routing to a version before it is unloaded: requests on their way arrive."""


class _Blocked(ReplicaRefused):
    """A replica cannot serve a version for a reason that is not the version's; it waits."""

    def __init__(self, message: str):
        super().__init__(503, message)


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
        publishes: Callable[[], bool] = lambda: True,
    ):
        """The parts that it works with.

        Args:
            publishes: false in a process that only follows: it proves for itself what replicas
                serve, and leaves it to another to move aliases and to unload.
        """
        self.publishes = publishes
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
        self._known: set[tuple[str, str, int]] = set()
        """Versions that were waiting when it last looked."""
        self.catalog = Catalog()
        self.looked = asyncio.Event()
        """Set when it has looked once, whatever it found."""
        self.failures: dict[tuple[str, str], Json] = {}
        """Versions whose probe failed, by project and `policy@N`."""
        self._blocking: dict[tuple[str, str], str] = {}
        self.blocked: dict[tuple[str, str], str] = {}
        """Policies whose versions wait because a replica is not what it should be, and why."""

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
            self.looked.set()
            await self._news()
            self._poked.clear()

    async def _news(self) -> None:
        """Wait for the next round: the poll's time, a poke, or a version that was just written."""
        until = time.monotonic() + self._poll
        while (left := until - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._poked.wait(), min(left, _GLANCE))
                return
            except TimeoutError:
                pass
            try:
                ready = await asyncio.to_thread(self._ready)
            except SQLAlchemyError:
                # The next round says so.
                continue
            if ready - self._known:
                return

    def _ready(self) -> set[tuple[str, str, int]]:
        with self._database.read() as connection:
            return queries.ready_versions(connection)

    def poke(self) -> None:
        """Look again at once."""
        self._poked.set()

    async def reconcile(self) -> None:
        """One round. Afterwards the catalog is what the replicas are proven to serve."""
        async with self._turn:
            await self._pool.refresh()
            self._blocking = {}
            found = await asyncio.to_thread(self._read)
            for policy in found:
                for replica in self._pool.healthy:
                    await self._bring_up(policy, replica)
            self._publish_catalog(found)
            if not self.publishes():
                self.blocked = self._blocking
                return
            for policy in found:
                for number in policy.waiting:
                    # While one is on trial, others wait behind it.
                    if policy.row["canary"] is None and not await self._publish(policy, number):
                        break
            if any(policy.waiting for policy in found):
                found = await asyncio.to_thread(self._read)
                self._publish_catalog(found)
            await self._retire(found)
            self.blocked = self._blocking

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
            changes = self._pool.drain_changes
            self._pool.learn_drained(drains.read(connection), changes)
            found = []
            for row in queries.all_policies(connection):
                listed = queries.versions(connection, row["project"], row["name"])
                versions = {version["number"]: version for version in listed}
                policy = _Policy(row, versions)
                serving = [n for n, v in versions.items() if v["state"] == "serving"]
                behind = sorted((n for n in serving if n != row["alias"]), reverse=True)
                trial = [] if row["canary"] is None else [row["canary"]]
                policy.wanted = [row["alias"], *trial, *behind[: self._keep_loaded]]
                policy.waiting = [n for n, v in versions.items() if v["state"] == "ready"]
                found.append(policy)
        self._known = {(*policy.key, number) for policy in found for number in policy.waiting}
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
            except (ProbeFailed, ReplicaRefused, _Blocked, adapters.BrokenAdapter) as error:
                replica.error = f"{policy.row['name']}@{number}: {error}"
                self._block(policy, f"{replica.url} cannot serve {replica.error}")
            except ReplicaUnavailable as error:
                replica.lost(str(error))
                return

    def _block(self, policy: _Policy, why: str) -> None:
        if self.blocked.get(policy.key) != why:
            log.error("%s", why)
        self._blocking[policy.key] = why

    async def _publish(self, policy: _Policy, number: int) -> bool:
        """Prove a version everywhere and serve it; False if it has to wait, and others with it."""
        project, name = policy.key
        began = time.monotonic()
        results: Json = {}
        try:
            if not self._pool.healthy:
                return False
            for replica in self._pool.healthy:
                results[replica.url] = await self._prove_new(policy, number, replica)
        except ReplicaUnavailable as error:
            log.warning("%s@%d waits: %s", name, number, error)
            return False
        except _Blocked as error:
            self._block(policy, f"{name}@{number} waits: {error}")
            return False
        except (ProbeFailed, ReplicaRefused, adapters.BrokenAdapter) as error:
            numbers = error.numbers if isinstance(error, ProbeFailed) else {"error": str(error)}
            log.error("%s@%d failed: %s", name, number, error)
            await self._writer.run(lambda c: policies.failed(c, project, name, number, numbers))
            await self._unload(policy.served_name(number))
            return True
        seconds = round(time.monotonic() - began, 3)
        result = {"replicas": results, "seconds": seconds, "tolerance": self._tolerance}
        share = policy.row["settings"].get("canary", {}).get("share", 0.0)
        if share:
            await self._writer.run(
                lambda c: trials.on_trial(c, project, name, number, result, share)
            )
            log.info("%s@%d is on trial with a share of %g", name, number, share)
            return False
        moved = await self._writer.run(
            lambda c: policies.published(c, project, name, number, result)
        )
        if moved:
            log.info("%s@%d is served (%.2f s)", name, number, seconds)
        return True

    async def _prove_new(self, policy: _Policy, number: int, replica: Replica) -> Json:
        """Prove a version that was never served; a replica's own fault is not held against it."""
        alias = policy.served_name(policy.row["alias"])
        if alias not in replica.proven:
            raise _Blocked(f"{replica.url} cannot even serve {alias}: {replica.error}")
        try:
            return await self._prove(policy, number, replica)
        except ProbeFailed as failure:
            probe, parent = policy.versions[number]["probe"], policy.versions[number]["parent"]
            before = probe.get("previous_logprobs") if probe else None
            known = parent in policy.versions and policy.served_name(parent) in replica.proven
            if before is None or not known or "mean_difference" not in failure.numbers:
                raise
            served = await replica.prompt_logprobs(policy.served_name(parent), probe["token_ids"])
            away = float(np.abs(np.asarray(served) - np.asarray(before)).mean())
            if away <= self._tolerance:
                raise
            raise _Blocked(
                f"{replica.url} is {away:.2g} nats away from the trainer for @{parent} too, which "
                "the step began from. Its base model is not the one that was trained on: start it "
                f"with {policy.row['base_model']}"
            ) from failure

    async def _prove(self, policy: _Policy, number: int, replica: Replica) -> Json:
        """Load a version on a replica and check that it answers with it; returns the numbers."""
        version = policy.versions[number]
        name = policy.served_name(number)
        loading = 0.0
        if version["adapter_path"] is not None:
            await self._check(policy, version["adapter_path"])
            if name not in replica.models:
                began = time.monotonic()
                await self._load(policy, name, version["adapter_path"], replica)
                loading = time.monotonic() - began
        numbers: Json = {}
        probe = version["probe"]
        if probe is not None:
            served = await replica.prompt_logprobs(name, probe["token_ids"])
            numbers = compare(served, probe, self._tolerance)
        replica.proven |= {name}
        return {**numbers, "load_seconds": round(loading, 3)}

    async def _load(self, policy: _Policy, name: str, path: str, replica: Replica) -> None:
        # The adapter was looked over: what is refused now is the server's own doing.
        try:
            await replica.load(name, path)
        except ReplicaRefused as error:
            rank = policy.row["lora"]["rank"]
            what = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, where it sees " + path
            if "rank" in str(error):
                what = f"the policy's rank is {rank}: start it with --max-lora-rank {rank} or more"
            raise _Blocked(f"{replica.url} refuses the adapter ({error}); {what}") from None

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
                    canary=policy.row["canary"],
                    canary_share=policy.row["settings"].get("canary", {}).get("share", 0.0),
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
