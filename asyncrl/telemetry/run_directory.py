"""The files of a run directory, and the checks before a run uses it."""

import difflib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from asyncrl.errors import ConfigError, TaskError

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/(?=[^/])")
"""An address such as s3://bucket/run, of which pathlib keeps one slash."""
CONTROLLER_LOG = "controller.jsonl"
"""File in the run's logs with starts, losses and restarts of workers, and all that was said."""
RUN_FILES = ("config.toml", "journal", "run.id")
PRIVATE = 0o700
"""Mode of run directories: they have keys, answers and what people said."""
WRITTEN = (
    *("", "logs", "checkpoints", "config.toml", "journal", "metrics.jsonl", "samples.jsonl", "evaluations.jsonl"),
    *("warnings.jsonl", "ratings.jsonl", "run.start", "run.lock", "status.json", "scaled.json"),
)
"""Folders and files that a run writes, the run directory first."""


class RunDirectory:
    """Paths of one run.

    config.toml: as used; journal; checkpoints/V/; model/: what the run starts from, for a model of
    the hub a link into its cache; hub.json: commits of models of the hub; metrics.jsonl, samples.jsonl,
    evaluations.jsonl; evaluations/: answers to held-out prompts, or episodes with a picture; best.json: the
    checkpoint that is kept for its metric; warnings.jsonl: of guards and the like;
    ratings.jsonl and feedback.json: what people said, and the address of their page;
    secrets.json: those of the config, which names them only as ***;
    fleet.jsonl: workers that were spawned or have ended; status.json: the newest state; commands.json: where the run
    takes commands; scaled.json: workers that `asyncrl scale` asked for; profiles/: traces of operators; recorded/: what
    crossed the lanes (telemetry.record_gb);
    copied.json, copying/: of copies in a store of objects; report.html; logs/; trace.json.gz;
    sources/: copies of prompts and code (source_copies.py);
    run.lock; run.id: 8 hex digits, which copies of the directory keep; run.start: name of the
    last start (fleet/launching/launcher.py).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.journal = path / "journal"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.answers = path / "evaluations"
        self.best = path / "best.json"
        self.warnings = path / "warnings.jsonl"
        self.ratings = path / "ratings.jsonl"
        self.feedback = path / "feedback.json"
        self.start = path / "run.start"
        self.status = path / "status.json"
        self.commands = path / "commands.json"
        self.scaled = path / "scaled.json"
        self.profiles = path / "profiles"
        self.recorded = path / "recorded"
        self.report = path / "report.html"
        self.logs = path / "logs"
        self.hub = path / "hub.json"
        self.sources = path / "sources"

    @property
    def started_before(self) -> bool:
        return self.config.exists()

    def printed_by(self, scorer: str) -> Path:
        """Returns the file with what the functions of one reward worker print."""
        return self.logs / f"{scorer}.printed"

    def printed(self) -> list[Path]:
        """Returns the files of reward workers whose functions printed something."""
        return list(self.logs.glob("*.printed"))

    def run_id(self) -> str:
        """Returns the run's id, which is made at its first start."""
        path = self.path / "run.id"
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        return path.read_text().strip()


MADE_BY = "made by `asyncrl run --run-dir`"
NO_RUN = f"holds no run: name a run directory, as {MADE_BY}"


def open_run_directory(path: Path) -> RunDirectory:
    """Opens the directory at `path`, which its owner alone may read from a first start on, and makes it when it does
    not exist. Raises ConfigError when it is not empty and holds no run, or cannot be written, or is an address."""
    refuse_address(path)
    directory = RunDirectory(path.resolve() if ".." in path.parts else path.absolute())
    try:
        directory.path.mkdir(PRIVATE, parents=True, exist_ok=True)
        entries = {entry.name for entry in directory.path.iterdir()}
        if not (entries <= {"logs", "run.lock", "join_keys"} or entries & set(RUN_FILES)):
            raise ConfigError(f"{path} is not empty and holds no run of asyncrl; name another with --run-dir")
        if not directory.started_before:
            with suppress(PermissionError):  # It is of somebody else, who chose.
                directory.path.chmod(PRIVATE)
        directory.logs.mkdir(exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    for each in (directory.path / name for name in WRITTEN):
        if each.exists() and not os.access(each, os.W_OK, effective_ids=True):
            raise ConfigError(
                f"{each} cannot be written: give yourself the right to (chmod -R u+w {path}), or go on in a copy: "
                f"cp -r it and name the copy with --run-dir"
            )
    return directory


def is_in_store(text: str) -> bool:
    """Returns whether it is the address of a run in a store of objects."""
    return text.startswith("s3://")


def refuse_address(path: Path) -> None:
    """Raises ConfigError for the address of a store of objects, which pathlib takes for a folder that is called s3:."""
    if (scheme := ADDRESS.match(str(path))) is not None:
        raise ConfigError(
            f"{scheme[0]}/{str(path)[scheme.end() :]} is an address, and a run directory is a folder: its journal is "
            "appended to and its checkpoints are renamed, which a store of objects does not do; name a folder, and "
            "copy it there when the run has ended"
        )


@contextmanager
def new_run_directory(parent: Path, name: str) -> Iterator[Path]:
    """Makes a new directory called `name`, or `name-2` and so on; removes it at the end when it is empty. Raises
    ConfigError when nothing can be written there."""
    parent_is_new = not parent.exists()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):  # Two runs of the same second get two directories.
            path = parent / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                path.mkdir(PRIVATE)
                break
    except OSError as error:
        raise _unusable(parent / name, error) from error
    try:
        yield path
    finally:
        with suppress(OSError):  # Not empty: it holds a run.
            path.rmdir()
            if parent_is_new:
                parent.rmdir()


class DirectoryRollback:
    """Restores what was at `path` when a run is refused. begun: set once the run has begun; then all files stay."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._config_path = RunDirectory(self._path).config
        self._missing = [folder for folder in (self._path, *self._path.parents) if not folder.exists()]
        self._entries = {entry.name for entry in self._path.iterdir()} if self._path.is_dir() else set()
        self._config = self._config_path.read_bytes() if self._config_path.is_file() else None
        self.begun = False

    @contextmanager
    def again_when_refused(self) -> Iterator[None]:
        """Restores the directory when a ConfigError or TaskError leaves the block before the run has begun."""
        try:
            yield
        except (ConfigError, TaskError):
            if not self.begun:
                self._restore()
            raise

    def _restore(self) -> None:
        for entry in [entry for entry in self._path.iterdir() if entry.name not in self._entries]:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if self._config is not None:
            self._config_path.write_bytes(self._config)
        for folder in self._missing:
            folder.rmdir()


def missing_run(path: Path, otherwise: str) -> ConfigError:
    """Returns the error about a path at which a run was expected. otherwise: what is wrong with a folder there."""
    if path.is_file():
        return ConfigError(f"{path} is a file: name the directory of a run")
    if not path.exists():
        around = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, around, 1)
        if near:
            return ConfigError(f"there is no folder {path}; did you mean {path.parent / near[0]}?")
        return ConfigError(f"{path} does not exist, so it {otherwise}")
    runs = [each for each in path.iterdir() if RunDirectory(each).started_before]
    if runs and not RunDirectory(path).started_before:
        newest = max(runs, key=lambda each: each.stat().st_mtime)
        return ConfigError(f"{path} is a folder of runs: name one of them, such as {newest}")
    return ConfigError(f"{path} {otherwise}")


def replace_bytes(path: Path, content: bytes) -> None:
    """Replaces a file, and makes its folder; readers see the old file or the new one, and a full disk leaves the old
    one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    fresh.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Does what `replace_bytes` does, with a text."""
    replace_bytes(path, text.encode())


def _unusable(path: Path, error: OSError) -> ConfigError:
    if path.is_file():
        return ConfigError(f"cannot use {path} as run directory: it is a file; name another with --run-dir")
    return ConfigError(f"cannot use {path} as run directory: {error.strerror}; name another with --run-dir")
