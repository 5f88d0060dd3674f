"""Audits a run: three witnesses that do not depend on each other check what it trained.

The number of samples in flight as a remainder proves nothing. So the samples in flight are derived from the records of
each sample and compared with the lists written at checkpoints, and the trained samples with the trainer's own chain.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.controller.gate.group_state import IN_FLIGHT
from asyncrl.controller.journal.checkpoints import Manifest, damage_with_advice, read_manifest, versions
from asyncrl.controller.journal.journal import Framed, Scan
from asyncrl.controller.journal.ledger import (
    CheckpointMade,
    InFlight,
    Ledger,
    Record,
    Restored,
    Resumed,
    Trained,
    difference,
)
from asyncrl.controller.journal.run_storage import FileStore, Store
from asyncrl.errors import JournalError
from asyncrl.telemetry.run_directory import NO_RUN, missing_run


@dataclass(slots=True)
class Witness:
    """One kind of comparison: how often it was made, and where it failed."""

    name: str
    checked: int = 0
    failures: list[str] = field(default_factory=list)

    def see(self, agrees: bool, failure: Callable[[], str]) -> None:
        self.checked += 1
        if not agrees:
            self.failures.append(failure())

    def __str__(self) -> str:
        state = "holds" if not self.failures else f"FAILS, {len(self.failures)} times; first: {self.failures[0]}"
        return f"{self.name}: {state} ({self.checked} compared)"


def audit(run_dir: Path) -> "Audit":
    """Audits the run in a directory. Raises ConfigError when it holds no run."""
    if not (run_dir / "journal").is_file():
        raise missing_run(run_dir, NO_RUN.replace("run", "journal", 1))
    with closing(FileStore(run_dir, writable=False)) as store:
        return Audit(store)


class Audit:
    """Audits the records of a run that count, up to the first illegal one. notes: findings beside the witnesses."""

    def __init__(self, store: Store) -> None:
        self.ledger = Ledger()
        self.notes: list[str] = []
        self._ways = Witness("samples move legally, attempts rise, none is trained twice")
        self._lists = Witness("in-flight lists equal what the records imply")
        self._chains = Witness("the trainer's chain equals that of the records")
        self.witnesses = (self._ways, self._lists, self._chains)
        self._open: dict[int, int] = {}
        self._in_flight = 0
        scan = Scan(store)
        self._check_tail(store, scan)
        self._manifests = self._read_manifests(store, scan)
        try:
            for framed in scan.surviving():
                self._take(framed)
        except JournalError as error:
            self._ways.see(False, error.__str__)
        self._chains.failures += [
            f"checkpoint {manifest.version} was made after byte {offset}, where no record that counts ends"
            for offset, manifest in sorted(self._manifests.items())
        ]

    @property
    def ok(self) -> bool:
        return not any(witness.failures for witness in self.witnesses)

    def __str__(self) -> str:
        ledger = self.ledger
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(ledger.dropped.items())) or "none"
        ended = f"{ledger.trained} trained + {ledger.dropped.total()} dropped ({reasons})"
        return "\n".join(
            [
                f"version {ledger.version}, incarnation {ledger.incarnation}",
                f"samples: {ledger.drawn} drawn = {ended} + {self._in_flight} in flight",
                *map(str, self.witnesses),
                *self.notes,
            ]
        )

    def _take(self, framed: Framed) -> None:
        record = framed.record
        if isinstance(record, InFlight):
            derived = self.ledger.in_flight()
            self._lists.see(
                record.groups == derived, lambda: f"byte {framed.start}: {difference(record.groups, derived)}"
            )
        else:
            try:
                self.ledger.apply(record)
            except JournalError as error:
                raise JournalError(f"byte {framed.start}: {error}") from error
            self._ways.see(
                self._balanced(record), lambda: f"byte {framed.start}: drawn is not trained + dropped + in flight"
            )
        if isinstance(record, Trained):
            self._compare_chain(record.chain, f"byte {framed.start}, version {record.version}")
        if (manifest := self._manifests.pop(framed.end, None)) is not None:
            self._compare_chain(manifest.chain, f"checkpoint {manifest.version}")

    def _balanced(self, record: Record) -> bool:
        """Returns whether drawn = trained + dropped + in flight. What is in flight is counted by stage, and only in the
        groups that the record names, so that the audit takes time in proportion to the records."""
        for group in _groups_of(record):
            state = self.ledger.groups.get(group)
            now = len([sample for sample in state.samples if sample.stage in IN_FLIGHT]) if state else 0
            self._in_flight += now - self._open.pop(group, 0)
            if now:
                self._open[group] = now
        return self.ledger.drawn == self.ledger.trained + self.ledger.dropped.total() + self._in_flight

    def _compare_chain(self, chain: str, where: str) -> None:
        own = self.ledger.chain.hex()
        self._chains.see(
            chain == own, lambda: f"{where}: the trainer's chain is {chain[:16]}, by the records {own[:16]}"
        )

    def _read_manifests(self, store: Store, scan: Scan) -> dict[int, Manifest]:
        manifests = {}
        for version in versions(store):
            try:
                manifest = read_manifest(store, version)
            except JournalError as error:
                self.notes.append(f"checkpoint {version} cannot be used: {error}")
                continue
            if scan.crc(manifest.offset) != manifest.crc:
                failure = f"the journal no longer begins with what checkpoint {version} was made after"
                self._ways.see(False, failure.__str__)
            manifests[manifest.offset] = manifest
        return manifests

    def _check_tail(self, store: Store, scan: Scan) -> None:
        if damage := damage_with_advice(store, scan):
            self._ways.see(False, damage.__str__)
        elif left := scan.size - scan.end:
            self.notes.append(f"the last {left} bytes are an unfinished record; the next start cuts them off")


def _groups_of(record: Record) -> Iterable[int]:
    match record:
        case Trained(cuts=cuts):
            return [group for group, _ in cuts]
        case InFlight() | CheckpointMade() | Resumed():
            return ()
        case Restored(groups=groups):
            return [group for group, _ in groups]
        case _:
            return (record.group,)
