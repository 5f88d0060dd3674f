"""Loads a config from command line > environment > file > defaults, and reports all mistakes at once."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.install_hints import program
from asyncrl.config.problems import report
from asyncrl.config.schema import Config
from asyncrl.config.sections.environment_config import acting_defaults
from asyncrl.config.sources.keys import closest
from asyncrl.config.sources.layers import (
    EXTENDS,
    ConfigLayer,
    environment_layer,
    file_layer,
    flags_layer,
    merged_tables,
    values_layer,
)
from asyncrl.config.sources.packaged_experiments import SUFFIX, experiment_text, experiments
from asyncrl.config.sources.value_validation import config_of, problems_of_all, problems_of_values
from asyncrl.errors import ConfigError

_CONVERTED = "`{program} init NAME` writes one with comments"
_ROWS = f"rows are named in it: [task] prompts = FILE; {_CONVERTED}"
_OTHER_FORMATS = {
    **dict.fromkeys((".yaml", ".yml", ".ini", ".cfg"), _CONVERTED),
    **dict.fromkeys((".jsonl", ".csv", ".parquet", ".json"), _ROWS),
    ".py": "a script that calls asyncrl.train is run with python",
    ".ipynb": "a notebook calls asyncrl.train",
}
"""Advice about files that are given in place of an experiment, by their ending."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config. sources: place of each key that is not at its default ("FILE:12", "--steps", ...)."""

    config: Config
    sources: Mapping[str, str]


def load(
    target: str | Path | None = None,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Loaded:
    """Reads the experiment `target` (a name, or a TOML file) and puts over it environ (default: of this process), flags
    as typed, and `values`, nested or dotted keys from Python; raises ConfigError with every mistake of all sources."""
    layers = [] if target is None else _target_layers(target)
    layers.append(environment_layer(os.environ if environ is None else environ))
    return resolve([*layers, flags_layer(flags), values_layer(values or {})])


def refuse_unknown(target: str | Path) -> None:
    """Raises ConfigError, with the closest names, if there is no such experiment or file."""
    _read_text(target)


def read(path: Path) -> Config:
    """Reads the config of one file, without environment and flags."""
    return resolve(_target_layers(path)).config


def resolve(layers: Sequence[ConfigLayer]) -> Loaded:
    """Puts `layers` over one another, the weakest first; raises ConfigError with every mistake and contradiction."""
    layers = [_acting_layer(layers), *layers]
    problems = [problem for layer in layers for problem in (*layer.problems, *problems_of_values(layer.whole))]
    broken = {problem.key for problem in problems}
    merged: dict[str, tuple[Any, str]] = {}
    for layer in layers:
        for key, (value, place) in layer.entries.items():
            if key not in broken:
                weaker = merged[key][0] if key in layer.partial and key in merged else {}
                merged[key] = (merged_tables(weaker, value) if key in layer.partial else value, place)
    if all(layer.readable for layer in layers):
        given_in_parts = {key for layer in layers for key in layer.partial} & set(merged)
        problems += problems_of_values({key: merged[key] for key in given_in_parts})
        broken = {problem.key for problem in problems}
        problems += problems_of_all(merged, broken)
    if problems:
        raise ConfigError(report(problems, "mistakes in the configuration"))
    return Loaded(config_of(merged), {key: source for key, (_, source) in merged.items()})


def _acting_layer(layers: Sequence[ConfigLayer]) -> ConfigLayer:
    """Returns the values that follow from an environment to act in, weaker than all that are written."""
    written = {key: value for layer in layers for key, (value, _) in layer.entries.items()}
    given = {key.removeprefix("acting."): value for key, value in written.items() if key.startswith("acting.")}
    place = "a default with acting.env"
    return ConfigLayer({key: (value, place) for key, value in acting_defaults(given).items()})


def _target_layers(target: str | Path) -> list[ConfigLayer]:
    """Reads a file (a Path, a name with a folder, or one that ends in .toml) or else an experiment of the package, and
    what it extends; the weakest first."""
    source = _read_text(target)
    return [ConfigLayer({"name": (source.name, "the name of the experiment")}), *_with_bases(source, ())]


@dataclass(frozen=True, slots=True)
class _Text:
    """The text of a file or an experiment. place: its name in messages. folder: where its relative paths begin."""

    name: str
    place: str
    text: str
    folder: Path | None


def _with_bases(source: _Text, above: tuple[str, ...]) -> list[ConfigLayer]:
    """Returns the layer of a text after those of its bases, which give every key but the name of the experiment. above:
    places of the texts that extend this one."""
    if str(Path(source.place).absolute()) in [str(Path(place).absolute()) for place in above]:
        raise ConfigError(f"{above[-1]}: {EXTENDS} goes round in a circle: {' -> '.join((*above, source.place))}")
    layer = file_layer(source.text, source.place, source.folder)
    layers = list[ConfigLayer]()
    for base in layer.bases:
        try:
            found = _read_text(_base_target(base, source.folder))
        except ConfigError as error:
            raise ConfigError(f"{source.place}: {EXTENDS}: {error}") from None
        layers += _with_bases(found, (*above, source.place))
    for each in layers:
        each.entries.pop("name", None)
    return [*layers, layer]


def _base_target(base: str, folder: Path | None) -> str | Path:
    """Returns a file beside the one that names it, or the name of an experiment."""
    is_file = base.endswith(SUFFIX) or os.sep in base
    return (folder or Path()) / Path(base).expanduser() if is_file else base


def _read_text(target: str | Path) -> _Text:
    path = Path(target)
    if (other := _OTHER_FORMATS.get(path.suffix)) and not path.is_dir():
        advice = other.format(program=program())
        raise ConfigError(f"{path} is no experiment, which is a file of TOML whose name ends in {SUFFIX}; {advice}")
    if isinstance(target, str) and not target.endswith(SUFFIX) and os.sep not in target:
        if target not in experiments() and (path.is_dir() or _closest_files(path)):
            raise ConfigError(_no_file(path, f"there is no experiment {target!r}"))
        return _Text(target, f"experiment {target}", experiment_text(target), None)
    if not path.is_file():
        raise ConfigError(_no_file(path, f"there is no file {path}"))
    try:
        text = path.read_text(encoding="utf-8-sig")  # Editors of Windows put a mark before the text.
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8") from None
    return _Text(path.stem, str(path), text, _folder_of_paths(path))


def _folder_of_paths(path: Path) -> Path:
    """Returns where the relative paths of a file begin: its folder. Those in the config.toml of a run directory come
    from an older version, which read them from the current folder."""
    is_of_a_run = path.name == "config.toml" and (path.parent / "journal").exists()
    return Path.cwd() if is_of_a_run else path.absolute().parent


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
