"""Several processes answer on one port, and a scrape reaches one of them: it speaks for all.

Each leaves its counts in a small file every second; the one that is asked adds those of the others
to its own. The counts of a process that died stay until the whole gateway is started anew, so that
no counter runs backwards.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import orjson
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

log = logging.getLogger("strop.telemetry")

_SECONDS = 1.0
ADDED = frozenset(
    {
        "strop_requests",
        "strop_completions",
        "strop_tokens",
        "strop_completion_phase_seconds",
        "strop_commit_queue",
        "strop_commit_queue_limit",
        "strop_commit_seconds",
        "strop_writes",
        "strop_journal_entries",
        "strop_journal_pending_rewards",
        "strop_journal_rejected",
        "strop_replica_in_flight",
    }
)
"""Families of which every process has its own share; of the others one knows what all know."""

Counts = list[tuple[str, dict[str, str], float]]


class Siblings:
    """The files of one gateway's processes."""

    def __init__(self, data_dir: Path, collect: Callable[[], Iterable[Metric]]):
        self._folder = data_dir / "metrics"
        self._gateway = _start_of(os.getppid())
        self._file = self._folder / f"{self._gateway}-{os.getpid()}.json"
        self._collect = collect

    async def run(self) -> None:
        """Leave the counts until cancelled."""
        await asyncio.to_thread(self._clean)
        while True:
            try:
                counts = self._counts()
                await asyncio.to_thread(self._write, counts)
            except OSError as error:
                log.warning("the counts of this process are not shared: %s", error)
            await asyncio.sleep(_SECONDS)

    def add(self, families: Iterable[Metric]) -> None:
        """Add what the others counted. Blocks for reading a few small files."""
        theirs: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        names: dict[str, list[Sample]] = {}
        for file in sorted(self._folder.glob(f"{self._gateway}-*.json")):
            if file == self._file:
                continue
            try:
                found: Counts = orjson.loads(file.read_bytes())
            except (OSError, orjson.JSONDecodeError):
                continue
            for name, labels, value in found:
                key = (name, frozenset(labels.items()))
                if key not in theirs:
                    names.setdefault(name, []).append(Sample(name, labels, 0.0))
                theirs[key] = theirs.get(key, 0.0) + value
        for family in families:
            if family.name in ADDED:
                family.samples = _summed(family, theirs, names)

    def _counts(self) -> Counts:
        return [
            (sample.name, dict(sample.labels), float(sample.value))
            for family in self._collect()
            if family.name in ADDED
            for sample in family.samples
        ]

    def _write(self, counts: Counts) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(orjson.dumps(counts))
        partial.replace(self._file)

    def _clean(self) -> None:
        """Take away what an earlier start left."""
        for file in self._folder.glob("*-*.*"):
            if not file.name.startswith(f"{self._gateway}-"):
                file.unlink(missing_ok=True)


def _start_of(pid: int) -> str:
    """A process, and no other that had its number before: in a container it is always 1."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Its start, in ticks since that of the machine: field 22, of which two came before.
        return f"{pid}.{fields[19]}"
    except (OSError, IndexError):
        return str(pid)


def _summed(
    family: Metric,
    theirs: dict[tuple[str, frozenset[tuple[str, str]]], float],
    names: dict[str, list[Sample]],
) -> list[Sample]:
    ends = ("", "_total", "_bucket", "_count", "_sum", "_created")
    ours = {(s.name, frozenset(s.labels.items())): s for s in family.samples}
    for end in ends:
        for sample in names.get(family.name + end, ()):
            ours.setdefault((sample.name, frozenset(sample.labels.items())), sample)
    return [
        sample._replace(value=sample.value + theirs.get(key, 0.0)) for key, sample in ours.items()
    ]
