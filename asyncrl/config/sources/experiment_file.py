"""Finds the experiment that the user names: one that comes with the package, or a TOML file."""

import os
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.sources.keys import closest
from asyncrl.errors import ConfigError
from asyncrl.experiments import SUFFIX, experiment_text, experiments


@dataclass(frozen=True, slots=True)
class Target:
    """An experiment. text: its TOML. place: its name in messages."""

    name: str
    text: str
    place: str


def find(target: str | Path) -> Target:
    """Reads a file (a Path, a name with a folder, or one that ends in .toml) or else an experiment of the package.

    Raises:
        ConfigError: it does not exist, or is not text; the message names the closest experiment or file.
    """
    if isinstance(target, str) and not target.endswith(SUFFIX) and os.sep not in target:
        return _packaged(target)
    path = Path(target)
    if not path.is_file():
        raise ConfigError(_no_file(path, f"there is no file {path}"))
    try:
        return Target(path.stem, path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _packaged(name: str) -> Target:
    if name not in experiments() and (Path(name).is_dir() or _closest_files(Path(name))):
        raise ConfigError(_no_file(Path(name), f"there is no experiment {name!r}"))
    return Target(name, experiment_text(name), f"experiment {name}")


def _no_file(path: Path, missing: str) -> str:
    """Returns what is missing, and the file and the experiment with the closest names."""
    if path.is_dir():
        return f"{path} is a folder; a run that lies in one is resumed with --run-dir {path}"
    packaged = closest(path.stem, experiments())
    meant = [*_closest_files(path), *([f"the experiment {packaged}"] if packaged else [])]
    if meant:
        return f"{missing}; did you mean {' or '.join(meant)}?"
    return f"{missing}; the experiments that come with asyncrl are {', '.join(experiments())}"


def _closest_files(path: Path) -> list[str]:
    near = closest(path.stem, [other.stem for other in path.parent.glob(f"*{SUFFIX}")])
    return [f"the file {path.parent / near}{SUFFIX}"] if near else []
