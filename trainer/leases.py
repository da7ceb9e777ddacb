"""Holding claimed groups for as long as a step takes."""

import logging
import threading
from collections.abc import Sequence
from types import TracebackType

from gateway.store import Database, claims, policy_leases
from gateway.store.claims import ClaimedGroup, TrainablePolicy

log = logging.getLogger("strop.trainer")


class LeaseKeeper:
    """Renews the leases of a policy and of its groups in the background while its block runs.

    Leases that cannot be renewed run out by themselves; `finish_step` finds that out.
    """

    def __init__(
        self,
        database: Database,
        policy: TrainablePolicy,
        groups: Sequence[ClaimedGroup],
        worker: str,
        seconds: float,
    ):
        self._database = database
        self._policy = policy
        self._groups = groups
        self._worker = worker
        self._seconds = seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="strop-leases", daemon=True)

    def __enter__(self) -> "LeaseKeeper":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _renew(self) -> None:
        # Two renewals may fail before a lease is lost.
        while not self._done.wait(self._seconds / 3):
            try:
                policy_leases.hold(self._database, self._policy, self._worker, self._seconds)
                claims.renew_leases(self._database, self._groups, self._worker, self._seconds)
            except Exception as error:
                log.warning("leases were not renewed (%s); trying again", error)
