"""A run directory: what lies where, and whose run it is."""

import secrets
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError

MARKS = ("config.toml", "journal", "run.id")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run.

    config.toml: as used; journal; checkpoints/V/; model/: what the run starts from; metrics.jsonl, samples.jsonl,
    evaluations.jsonl; fleet.json; logs/; trace.json.gz; run.id: 8 hex digits that name its shared memory; run.lock.
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def started_before(self) -> bool:
        return self.config.exists()

    def run_id(self) -> str:
        """The run's name in shared memory; made at its first start."""
        path = self.path / "run.id"
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        return path.read_text().strip()


def open_run_directory(path: Path) -> RunDirectory:
    """The directory at `path`, made if it is not there.

    Raises:
        ConfigError: it exists, is not empty, and is no run directory, or cannot be written.
    """
    directory = RunDirectory(path.absolute())
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        if not _ours_or_empty(directory):
            raise ConfigError(f"{path} is not empty and holds no run of asyncrl; name another with --run-dir")
        directory.logs.mkdir(exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}; name another with --run-dir"
        raise ConfigError(f"cannot use {path} as run directory: {reason}") from error
    return directory


def _ours_or_empty(directory: RunDirectory) -> bool:
    entries = {entry.name for entry in directory.path.iterdir()}
    return entries <= {"logs", "run.lock"} or bool(entries & set(MARKS))
