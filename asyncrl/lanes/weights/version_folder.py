"""The folder of `weights.transport = "file"`, in which each start of a run has a folder of its own. Without torch."""

import tempfile
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import ConfigError


def folder_of_start(folder: str, run_dir: Path, start: str) -> Path:
    """Returns where a start writes its versions. folder: `weights.folder`, "" for one in the run directory."""
    return Path(folder or run_dir / "weights").absolute() / start


def make_folder(folder: Path) -> None:
    """Makes the folder unless it exists, and writes there. Raises ConfigError when that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"weights")
    except OSError as error:
        raise ConfigError(
            f"weights.folder: new weights cannot be written to {folder} ({error.strerror or error}); name a folder in "
            "which the trainer can write, and which every host of generation workers sees"
        ) from error


def try_folder(folder: Path) -> None:
    """Does what `make_folder` does, and removes the folders that it made."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        make_folder(folder)
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
