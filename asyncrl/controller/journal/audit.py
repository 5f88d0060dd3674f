"""Audits a run: three witnesses that do not depend on each other check what it trained.

The number of samples in flight as a remainder proves nothing. So the samples in flight are derived from the records of
each sample and compared with the lists written at checkpoints, and the trained samples with the trainer's own chain.
"""

from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.install_hints import program
from asyncrl.controller.journal.checkpoints import Manifest, prefix_crc, read_manifest, versions
from asyncrl.controller.journal.journal_records import Framed, InFlight, Scan, Trained
from asyncrl.controller.journal.journal_store import FileStore, Store
from asyncrl.controller.journal.ledger import Ledger, difference, surviving
from asyncrl.errors import ConfigError, JournalError


@dataclass(slots=True)
class Witness:
    """One kind of comparison: how often it was made, and where it failed."""

    name: str
    checked: int = 0
    failures: list[str] = field(default_factory=list)

    def see(self, agrees: bool, failure: str) -> None:
        self.checked += 1
        if not agrees:
            self.failures.append(failure)

    def __str__(self) -> str:
        state = "holds" if not self.failures else f"FAILS, {len(self.failures)} times; first: {self.failures[0]}"
        return f"{self.name}: {state} ({self.checked} compared)"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit. drawn, trained, in_flight: samples; dropped: samples by reason; notes: other findings."""

    version: int
    incarnation: int
    drawn: int
    trained: int
    dropped: dict[str, int]
    in_flight: int
    witnesses: tuple[Witness, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not any(witness.failures for witness in self.witnesses)

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        dropped = f"{sum(self.dropped.values())} dropped ({reasons})"
        return "\n".join(
            [
                f"version {self.version}, incarnation {self.incarnation}",
                f"samples: {self.drawn} drawn = {self.trained} trained + {dropped} + {self.in_flight} in flight",
                *map(str, self.witnesses),
                *self.notes,
                "the audit holds" if self.ok else "the audit FAILS",
            ]
        )


def audit(run_dir: Path) -> AuditReport:
    """Audits the run in a directory. Raises ConfigError when it holds no run."""
    if not (run_dir / "journal").is_file():
        raise ConfigError(f"{run_dir} holds no journal: name a run directory, as made by `{program()} run --run-dir`")
    store = FileStore(run_dir, writable=False)
    try:
        return audit_store(store)
    finally:
        store.close()


def audit_store(store: Store) -> AuditReport:
    """Audits a run; reads only."""
    auditor = Auditor(store)
    auditor.walk()
    return auditor.report()


class Auditor:
    """Walks over the records that count, up to the first illegal one."""

    def __init__(self, store: Store) -> None:
        self.ways = Witness("samples move legally, attempts rise, none is trained twice")
        self.lists = Witness("in-flight lists equal what the records imply")
        self.chains = Witness("the trainer's chain equals that of the records")
        self.notes: list[str] = []
        self._store = store
        self._ledger = Ledger()
        self._manifests = self._read_manifests()

    def walk(self) -> None:
        self._check_tail()
        try:
            for framed in surviving(self._store):
                self._take(framed)
        except JournalError as error:
            self.ways.see(False, str(error))
        self.chains.failures += [
            f"checkpoint {manifest.version} was made after byte {offset}, where no record that counts ends"
            for offset, manifest in sorted(self._manifests.items())
        ]

    def report(self) -> AuditReport:
        ledger = self._ledger
        in_flight = sum(len(members) for _, members in ledger.in_flight())
        witnesses = (self.ways, self.lists, self.chains)
        return AuditReport(
            version=ledger.version,
            incarnation=ledger.incarnation,
            drawn=ledger.drawn,
            trained=ledger.trained,
            dropped=dict(ledger.dropped),
            in_flight=in_flight,
            witnesses=witnesses,
            notes=tuple(self.notes),
        )

    def _take(self, framed: Framed) -> None:
        record, where = framed.record, f"byte {framed.start}"
        if isinstance(record, InFlight):
            derived = self._ledger.in_flight()
            self.lists.see(record.groups == derived, f"{where}: {difference(record.groups, derived)}")
        else:
            self._apply(framed, where)
        if isinstance(record, Trained):
            self._compare_chain(record.chain, f"{where}, version {record.version}")
        manifest = self._manifests.pop(framed.end, None)
        if manifest is not None:
            self._compare_chain(manifest.chain, f"checkpoint {manifest.version}")

    def _apply(self, framed: Framed, where: str) -> None:
        try:
            self._ledger.apply(framed.record)
        except JournalError as error:
            raise JournalError(f"{where}: {error}") from error
        self.ways.see(self._ledger.balanced(), f"{where}: drawn is not trained + dropped + in flight")

    def _compare_chain(self, chain: str, where: str) -> None:
        own = self._ledger.chain.hex()
        self.chains.see(chain == own, f"{where}: the trainer's chain is {chain[:16]}, by the records {own[:16]}")

    def _read_manifests(self) -> dict[int, Manifest]:
        manifests = {}
        for version in versions(self._store):
            try:
                manifest = read_manifest(self._store, version)
            except JournalError as error:
                self.notes.append(f"checkpoint {version} cannot be used: {error}")
                continue
            if prefix_crc(self._store, manifest.offset) != manifest.crc:
                self.ways.see(False, f"the journal no longer begins with what checkpoint {version} was made after")
            manifests[manifest.offset] = manifest
        return manifests

    def _check_tail(self) -> None:
        scan = Scan(self._store.read, self._store.size)
        for _ in scan:
            pass
        left = self._store.size - scan.end
        if scan.damaged:
            self.ways.see(False, f"byte {scan.end}: a damaged record, with {left} bytes from it on unread")
        elif left:
            self.notes.append(f"the last {left} bytes are an unfinished record; the next start cuts them off")
