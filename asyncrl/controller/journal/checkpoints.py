"""Makes checkpoints, knows the newest and the best one, and resumes runs from them.

The rename of a checkpoint's folder is its commit; its record in the journal is a hint. A checkpoint is good when its
files match their digests and the journal still begins with the bytes that the checkpoint was made after.
The oldest ones go; the best one by `training.keep_best` is spared: what a step or an evaluation measured is noted, and
kept in best.json.
"""

import json
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import file_digest, sha256
from math import isnan, nan
from os.path import normpath
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, NamedTuple

from asyncrl.config.install_hints import program
from asyncrl.controller.gate.group_state import Cut, Stage
from asyncrl.controller.journal.journal import Journal, Scan, void_ranges
from asyncrl.controller.journal.ledger import CheckpointMade, Drawn, InFlight, Ledger, Trained
from asyncrl.controller.journal.run_storage import CheckpointFolders, Folders, Store
from asyncrl.errors import ConfigError, JournalError, RemoteError, WireError
from asyncrl.lanes.control.field_checks import field_checks
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.messages import Checkpointed
from asyncrl.rewards.templates import reaches
from asyncrl.telemetry.run_directory import RunDirectory, replace_text

MANIFEST = "manifest.json"
UNFINISHED = "tmp-"
REFUSED = "refused-"

WriteFiles = Callable[[str], Awaitable[Checkpointed]]
"""Lets the trainer write its files, fsynced, into a directory."""


Spared = Callable[[Sequence[int]], Collection[int]]
"""Returns those of the checkpoints that are not removed, however old they are."""


def nothing_spared(made: Sequence[int]) -> Collection[int]:
    return ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Identifies a checkpoint. offset, crc: of the journal then. chain: the trainer's, hex. files: path -> SHA-256.
    ready: the samples whose rows are in one of the files. They are READY, or RUNNING episodes: the journal says which.
    """

    incarnation: int
    version: int
    offset: int
    crc: int
    chain: str
    files: dict[str, str]
    ready: tuple[Cut, ...] = ()

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()


MANIFEST_FIELDS = dict(field_checks(Manifest))


class SavedSamples(NamedTuple):
    """The samples that a resume can go on with. waiting: they waited for training. answered: running episodes, of which
    there is the row up to the newest turn that their environment had answered."""

    waiting: tuple[Cut, ...] = ()
    answered: tuple[SampleName, ...] = ()


NOTHING_SAVED = SavedSamples()


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """The checkpoint from which a run is resumed. incarnation: the new one. ledger: at the checkpoint.

    directory: folder of its files. last_version: that of the last step, which may have come after the checkpoint. said:
    a line for the user about each newer checkpoint that cannot be used. scan: of the journal, until it is resumed.
    ready: the samples that can be restored, because they were READY and their rows are in the checkpoint. answered: the
    running episodes whose rows are there.
    """

    incarnation: int
    version: int
    offset: int
    directory: str
    ledger: Ledger
    last_version: int
    said: tuple[str, ...]
    scan: Scan = field(compare=False, repr=False)
    ready: tuple[Cut, ...] = ()
    answered: tuple[SampleName, ...] = ()

    def restorable(self, *, whole_groups: bool) -> SavedSamples:
        """Returns the samples to restore. whole_groups: of those that waited for training only the ones of groups in
        which nothing else is in flight."""
        in_flight = dict(self.ledger.in_flight())
        waiting = tuple(cut for cut in self.ready if not whole_groups or in_flight[cut[0]] == cut[1])
        return SavedSamples(waiting, self.answered)


async def commit(journal: Journal, write: WriteFiles, keep: int, kept: Spared = nothing_spared) -> Manifest:
    """Makes the checkpoint of the journal's version, while no iteration runs, and leaves the newest `keep` and those
    that `kept` returns.

    What waits for the disk does not hold up the event loop; records that are appended meanwhile lie behind the
    checkpoint. Raises JournalError when the trainer is at another version, or trained other samples, than the journal
    says.
    """
    store = journal.store
    ledger = journal.ledger
    journal.append(InFlight(ledger.in_flight()))
    after = Manifest(ledger.incarnation, ledger.version, journal.offset, journal.crc, ledger.chain.hex(), {})
    await store.run(journal.sync)
    if after.version in versions(store):
        return read_manifest(store, after.version)
    unfinished = f"{UNFINISHED}{after.version}"
    try:
        manifest = await _write_files(store, unfinished, after, write)
    except (OSError, RemoteError):
        with suppress(OSError):  # Another rank may be writing there: then a resume removes it.
            await store.run(store.remove, unfinished)  # On a full disk it is in the way of all that follows.
        raise
    await store.run(store.rename, unfinished, str(manifest.version))
    journal.append(CheckpointMade(manifest.version, sha256(manifest.encode()).hexdigest()))
    made = versions(store)
    spared = kept(made)
    for old in made[:-keep]:
        if old not in spared:
            await store.run(store.remove, str(old))
    return manifest


async def _write_files(store: Store, unfinished: str, after: Manifest, write: WriteFiles) -> Manifest:
    await store.run(store.create, unfinished)
    made = await write(store.path(unfinished))
    if (made.version, made.chain) != (after.version, after.chain):
        raise JournalError(
            f"the trainer wrote version {made.version} with chain {made.chain[:16]}; "
            f"by the journal it is version {after.version} with chain {after.chain[:16]}"
        )
    manifest = replace(after, files=made.files, ready=_cuts(made.ready))
    await store.run(store.put, unfinished, MANIFEST, manifest.encode())
    return manifest


def _cuts(samples: Iterable[SampleName]) -> tuple[Cut, ...]:
    members: dict[int, set[int]] = {}
    for group, member, _ in samples:
        members.setdefault(group, set()).add(member)
    return tuple((group, tuple(sorted(members[group]))) for group in sorted(members))


def versions(store: Folders) -> list[int]:
    return sorted(int(name) for name in store.folders() if name.isdecimal())


def read_manifest(store: Folders, version: int) -> Manifest:
    """Reads the manifest of a checkpoint. Raises JournalError when there is none, or it is not one of asyncrl."""
    try:
        with store.open(str(version), MANIFEST) as file:
            manifest = _manifest(json.load(file))
    except (FileNotFoundError, ValueError, RecursionError, WireError) as error:
        raise JournalError(f"{MANIFEST} cannot be read: {error}") from error
    if manifest.version != version:
        raise JournalError(f"{MANIFEST} is of version {manifest.version}")
    return manifest


def _manifest(fields: Any) -> Manifest:
    if type(fields) is dict and "epoch" in fields:  # Older versions of asyncrl called the field so.
        fields["incarnation"] = fields.pop("epoch")
    if type(fields) is dict:  # Older versions saved no rows; and JSON knows no tuples.
        fields["ready"] = _tuples(fields.get("ready", []))
    if type(fields) is not dict or fields.keys() != MANIFEST_FIELDS.keys():
        raise ValueError(f"it holds other fields than {', '.join(MANIFEST_FIELDS)}")
    manifest = Manifest(**{name: check(fields[name]) for name, check in MANIFEST_FIELDS.items()})
    if manifest.offset < 0:
        raise ValueError(f"the journal cannot have had {manifest.offset} bytes")
    if outside := [file for file in manifest.files if not _lies_within(file)]:
        raise ValueError(f"{outside[0]!r:.100} is no file of a checkpoint")
    return manifest


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if type(value) is list else value


def _lies_within(file: str) -> bool:
    path = PurePosixPath(file)
    return "\0" not in file and file.isprintable() and not path.is_absolute() and ".." not in path.parts


def _check_files(store: Folders, manifest: Manifest) -> None:
    """Raises JournalError when a file of a checkpoint does not have its digest."""
    for file, digest in sorted(manifest.files.items()):
        path = Path(store.path(str(manifest.version))) / file
        advice = (
            f"; it is a link: put back {normpath(path.parent / path.readlink())} as it was" if path.is_symlink() else ""
        )
        try:
            with store.open(str(manifest.version), file) as source:
                found = file_digest(source, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise JournalError(f"{file} is missing{advice}") from error
        except OSError as error:
            raise JournalError(f"{file} cannot be read: {error}") from error
        if found != digest:
            raise JournalError(f"{file} was changed or damaged: its digest is {found[:16]}, not {digest[:16]}{advice}")


def _check(store: Store, scan: Scan, manifest: Manifest) -> Ledger:
    """Returns the ledger at a checkpoint. Raises JournalError with the reason when the checkpoint is not good."""
    _check_files(store, manifest)
    if manifest.offset > scan.size:
        raise JournalError(f"the journal has {scan.size} bytes; the checkpoint was made after {manifest.offset}")
    if scan.crc(manifest.offset) != manifest.crc:
        raise JournalError(f"the first {manifest.offset} bytes of the journal are not those it was made after")
    for low, high in void_ranges(scan.resumes):
        if low < manifest.offset <= high:
            raise JournalError(f"the run was taken up again from an earlier point (byte {low} of the journal)")
    ledger = scan.replay(manifest.offset)
    if (ledger.version, ledger.chain.hex()) != (manifest.version, manifest.chain):
        raise JournalError(
            f"its trainer was at version {manifest.version} with chain {manifest.chain[:16]}; "
            f"the journal there says version {ledger.version} with chain {ledger.chain.hex()[:16]}"
        )
    return ledger


def plan_resume(store: Store) -> ResumePlan | None:
    """Plans, without writing, to resume from the newest good checkpoint.

    It reads the journal once, and every file of that checkpoint, which may take minutes. None when the run has no
    checkpoint yet and drew nothing. Raises JournalError when the journal is damaged, or no checkpoint is good.
    """
    scan = Scan(store)
    if damage := damage_with_advice(store, scan):
        raise JournalError(damage)
    said: list[str] = []
    for version in reversed(versions(store)):
        try:
            manifest = read_manifest(store, version)
            ledger = _check(store, scan, manifest)
        except JournalError as error:
            said.append(f"checkpoint {version} cannot be used: {error}")
        else:
            return _plan(store, scan, manifest, ledger, tuple(said))
    if not said and not any(isinstance(framed.record, Drawn) for framed in scan):
        return None
    reasons = "; ".join(said) or "there is none"
    raise JournalError(f"this run cannot go on from any checkpoint ({reasons}); start it anew with another --run-dir")


def damage_with_advice(store: Store, scan: Scan) -> str:
    """Describes damage of the journal and what to do about it; "" when there is at most a torn tail."""
    if not (damage := scan.damage()):
        return ""
    journal = store.journal_path
    lost = scan.size - scan.end
    text = f"{damage}. Put an undamaged copy of {journal} in its place"
    cut = _truncation(journal, scan.end)
    for version in reversed(versions(store)):
        with suppress(JournalError):
            if (manifest := read_manifest(store, version)).offset <= scan.end:
                _check(store, scan, manifest)
                return (
                    f"{text}; or give up its last {lost} bytes with `{cut}`: the same command then goes on from "
                    f"step {version}, in {store.path(str(version))}"
                )
    intact = next(filter(partial(_is_intact, store), reversed(versions(store))), None)
    if intact is None:
        return f"{text}. No checkpoint of this run can be used without it: else start anew, with another --run-dir"
    return (
        f"{text}. All intact checkpoints were made after that byte, so that shortening the journal leads to none; but "
        f"`{program()} export` copies the model of step {intact} ({store.path(str(intact))}), from which a new run "
        "starts with another --run-dir and --model.name FOLDER"
    )


def _truncation(journal: str, size: int) -> str:
    """Returns the shell command that keeps a copy of a journal and cuts it."""
    quoted = quote(journal)
    return f"cp {quoted} {quote(journal + '.damaged')} && truncate -s {size} {quoted}"


def _is_intact(store: Folders, version: int) -> bool:
    try:
        _check_files(store, read_manifest(store, version))
    except JournalError:
        return False
    return True


def _plan(store: Store, scan: Scan, manifest: Manifest, ledger: Ledger, said: tuple[str, ...]) -> ResumePlan:
    beyond = [framed.record for framed in scan.surviving(since=manifest.offset)]
    return ResumePlan(
        incarnation=max([manifest.incarnation, *(resumed.incarnation for _, resumed in scan.resumes)]) + 1,
        version=manifest.version,
        offset=manifest.offset,
        directory=store.path(str(manifest.version)),
        ledger=ledger,
        last_version=max([manifest.version, *(record.version for record in beyond if isinstance(record, Trained))]),
        said=said,
        scan=scan,
        ready=_waiting(ledger, manifest.ready),
        answered=_running(ledger, manifest.ready),
    )


def _waiting(ledger: Ledger, cuts: Iterable[Cut]) -> tuple[Cut, ...]:
    """Returns those samples that wait for training, with tokens of no later version than the ledger's."""
    found = []
    for group, members in cuts:
        samples = ledger.groups[group].samples if group in ledger.groups else []
        young = (member for member, sample in enumerate(samples) if sample.last <= ledger.version)
        if left := tuple(member for member in young if member in members and samples[member].stage is Stage.READY):
            found.append((group, left))
    return tuple(found)


def _running(ledger: Ledger, cuts: Iterable[Cut]) -> tuple[SampleName, ...]:
    """Returns those samples that run, by the names that their rows have."""
    states = {group: ledger.groups[group].samples for group, _ in cuts if group in ledger.groups}
    return tuple(
        (group, member, states[group][member].attempt)
        for group, members in cuts
        for member in members
        if group in states and member < len(states[group]) and states[group][member].stage is Stage.RUNNING
    )


def resume(store: Store, plan: ResumePlan, restored: tuple[Cut, ...] = ()) -> Journal:
    """Carries out the plan: cuts a torn tail, sets unusable checkpoints aside, and voids the records after the plan.

    restored: samples that go on as they are; all others in flight begin a new attempt.
    """
    for folder in store.folders():
        if folder.startswith(UNFINISHED):
            store.remove(folder)
        elif folder.isdecimal() and int(folder) > plan.version:
            store.remove(f"{REFUSED}{folder}")
            store.rename(folder, f"{REFUSED}{folder}")
    journal = Journal(store, plan.scan, plan.ledger)
    journal.resume(plan.incarnation, plan.offset, plan.ledger, restored)
    return journal


def newest_model(run_dir: Path) -> tuple[Path, int]:
    """Returns `model/` of the newest checkpoint whose files are intact, and its version; no journal is read. Newer ones
    are reported on standard error. Raises ConfigError when there is no checkpoint, JournalError when none is intact."""
    store = CheckpointFolders(run_dir)
    refused = []
    for version in reversed(versions(store)):
        try:
            _check_files(store, read_manifest(store, version))
        except JournalError as error:
            refused.append(f"checkpoint {version}: {error}")
        else:
            sys.stderr.writelines(f"asyncrl: {each}; an older one is used\n" for each in refused)
            return Path(store.path(str(version))) / "model", version
    if not refused:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    raise JournalError(f"no checkpoint of {run_dir} can be used ({'; '.join(refused)})")


def saved_model(run_dir: Path, version: int) -> tuple[Path, int]:
    """Returns `model/` of this checkpoint, and its version. Raises ConfigError when the run has none of this version,
    JournalError when it is damaged."""
    store = CheckpointFolders(run_dir)
    if version not in (there := versions(store)):
        known = f"there are {', '.join(map(str, there))}" if there else "there is none yet"
        raise ConfigError(
            f"{run_dir} has no checkpoint of step {version}; {known} (training.checkpoint_every and "
            "training.keep_checkpoints say which are kept)"
        )
    try:
        _check_files(store, read_manifest(store, version))
    except JournalError as error:
        raise JournalError(f"checkpoint {version}: {error}") from error
    return Path(store.path(str(version))) / "model", version


# ---- the best checkpoint -------------------------------------------------------------------------------------------


BEST = "best"
"""Stands for the number of that checkpoint in commands."""


@dataclass
class BestCheckpoint:
    """Follows `training.keep_best`. path: best.json. metric: "-" before its name: the lowest value is the best; "": no
    checkpoint is kept. pending: returns the versions whose evaluation is not known yet."""

    path: Path
    metric: str
    pending: Callable[[], Collection[int]] = tuple
    values: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._name = self.metric.removeprefix("-")
        self._newest = -1

    @property
    def is_evaluated(self) -> bool:
        """Returns whether evaluations measure the metric, and not steps."""
        return self._name.startswith("eval/")

    def restore(self, version: int) -> None:
        """Takes the values of checkpoints up to this version, which an earlier start of the run noted."""
        self._newest = version
        if not self.metric or not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        if found["metric"] == self.metric:
            self.values = {int(each): value for each, value in found["values"].items() if int(each) <= version}

    def note(self, version: int, metrics: Mapping[str, float]) -> None:
        """Takes what was measured of a version."""
        self._newest = max(self._newest, version)
        if self.metric and self._name in metrics:
            self.values[version] = metrics[self._name]

    def kept(self, versions: Sequence[int]) -> set[int]:
        """Returns those of the checkpoints that stay, however many are newer: the best one, and those that may be."""
        if not self.metric:
            return set()
        unknown = self.pending() if self.is_evaluated else (each for each in versions if each > self._newest)
        best = self.best(versions)
        return {*unknown, *(() if best is None else (best,))}

    def best(self, versions: Sequence[int]) -> int | None:
        """Returns the best of these checkpoints, the newest of those that are equal but for rounding; None while
        nothing is known of any."""
        sign = -1.0 if self.metric.startswith("-") else 1.0
        known = {
            each: sign * self.values[each]
            for each in sorted(versions, reverse=True)
            if not isnan(self.values.get(each, nan))
        }
        most = max(known.values(), default=0.0)
        return next((each for each, value in known.items() if reaches(value, most)), None)

    def write(self, versions: Sequence[int]) -> None:
        """Writes best.json, if there is a best checkpoint. Raises OSError."""
        if (best := self.best(versions)) is None:
            return
        newer = max(versions)
        self.values = {each: value for each, value in self.values.items() if each in versions or each > newer}
        found = {"metric": self.metric, "version": best, "value": self.values[best], "values": self.values}
        replace_text(self.path, json.dumps(found) + "\n")


def chosen_model(run_dir: Path, step: str = "") -> tuple[Path, int]:
    """Returns `model/` of a checkpoint and its version. step: its number, `best`, or "" for the newest good one. Raises
    ConfigError when there is none, and JournalError when it is damaged."""
    if not step:
        return newest_model(run_dir)
    if step.isdecimal():
        return saved_model(run_dir, int(step))
    if step != BEST:
        raise ConfigError(f"--step {step}: write the number of a step, or {BEST}")
    if not (path := RunDirectory(run_dir).best).exists():
        raise ConfigError(f"{run_dir} keeps no best checkpoint: train with training.keep_best = METRIC")
    return saved_model(run_dir, int(json.loads(path.read_text())["version"]))
