"""The experiment someone names: one that comes with the package, or a TOML file."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.experiments import SUFFIX, experiment_text, experiments
from asyncrl.settings.keys import closest


@dataclass(frozen=True, slots=True)
class Target:
    """name: of the experiment; text: its TOML; place: what messages call it."""

    name: str
    text: str
    place: str


def find(target: str | Path) -> Target:
    """A Path, a name with a folder in it or one that ends in .toml is a file; anything else an experiment's name.

    Raises:
        ConfigError: there is none, or it is no text; the message names the closest experiment or file.
    """
    if isinstance(target, str) and not target.endswith(SUFFIX) and os.sep not in target:
        return _packaged(target)
    path = Path(target)
    if not path.is_file():
        raise ConfigError(_no_file(path))
    try:
        return Target(path.stem, path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def _packaged(name: str) -> Target:
    if name not in experiments() and (near := closest(f"{name}{SUFFIX}", _files(Path()))):
        raise ConfigError(_neither(f"there is no experiment {name!r}", name, [f"the file {near}"]))
    return Target(name, experiment_text(name), f"experiment {name}")


def _no_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder; a run that lies in one is resumed with --run-dir {path}"
    near = closest(path.name, _files(path.parent))
    files = [f"the file {path.parent / near}"] if near else []
    return _neither(f"there is no file {path}", path.stem, files)


def _neither(missing: str, name: str, files: Iterable[str]) -> str:
    """What is missing, and what could be meant: files, and the experiment with the closest name."""
    packaged = closest(name, experiments())
    meant = [*files, *([f"the experiment {packaged}"] if packaged else [])]
    if meant:
        return f"{missing}; did you mean {' or '.join(meant)}?"
    return f"{missing}; the experiments that come with asyncrl are {', '.join(experiments())}"


def _files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(f"*{SUFFIX}")]
