"""Loads a config from command line > environment > file > defaults, and reports all mistakes at once, each with its
key, place and what to write."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config.install_hints import program
from asyncrl.config.problems import Incoherent, Problem, report
from asyncrl.config.schema import Config, RewardFunction
from asyncrl.config.sections.device_pools import PoolConfig
from asyncrl.config.sections.evaluate_config import EvaluationSet
from asyncrl.config.sections.task_config import SOURCE, SOURCES, MixedSource, acting_defaults
from asyncrl.config.sections.training_config import (
    AXES_OF_TRAINER,
    DeepspeedConfig,
    GenerationLayoutConfig,
    LayoutConfig,
    LoraConfig,
    TrainingLayoutConfig,
)
from asyncrl.config.sources.keys import all_keys, closest
from asyncrl.config.sources.layers import (
    EXTENDS,
    ConfigLayer,
    environment_layer,
    file_layer,
    flags_layer,
    merged_tables,
    values_layer,
)
from asyncrl.config.toml_writer import value_text
from asyncrl.errors import ConfigError
from asyncrl.experiments import SUFFIX, experiment_text, experiments

# Says what is wrong with the values of a config: makes a problem with key, place and advice of each pydantic error.


Entries = Mapping[str, tuple[Any, str]]
"""Values with their places, by dotted key."""
FORMS = {
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list, written as [...]"),
    **dict.fromkeys(("model_type", "dict_type"), "must be a table, written as { KEY = VALUE }"),
    "missing": "is missing",
}
"""Forms that values must have, by the type of pydantic's error."""
WORDS = {
    **dict.fromkeys(("function", "path", "file", "template", "source"), "use"),
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "lora_dropout": "dropout",
    "fsdp": "shard",
    "ddp": "dp",
    **dict.fromkeys(("zero", "zero_stage", "zero_optimization"), "stage"),
    **dict.fromkeys(("offload_optimizer", "cpu_offload"), "offload"),
    "memory": "memory_gb",
    "gpus": "devices",
    "reward_weight": "weight",
}
"""Keys of tables by names that people give to them."""
TABLES: Mapping[str, type[BaseModel]] = {
    "model": LoraConfig,
    "pools": PoolConfig,
    "evaluate": EvaluationSet,
    "task": MixedSource,
    "generation": GenerationLayoutConfig,
    "training.layout": TrainingLayoutConfig,
    "layout": LayoutConfig,
    "deepspeed": DeepspeedConfig,
}
"""Tables with keys of their own, by a part of the place of a value; all others are reward functions."""
OFFLINE = ("dpo", "sft", "kto", "orpo", "ipo", "simpo", "cpo")
"""Algorithms without sampling."""
_NUMBER = re.compile(r"[+-]?([\d.]+)(?:[eE]\d+| ?([A-Za-z%]+))")


def config_of(entries: Entries) -> Config:
    """Validates a config; raises ValidationError, also for a required key that is missing."""
    # Required sections are always present, so that what is missing is their key.
    tree: dict[str, Any] = {key.name.partition(".")[0]: {} for key in all_keys().values() if key.required}
    for name, (value, _) in entries.items():
        section, _, key = name.rpartition(".")
        table = tree.setdefault(section, {}) if section else tree
        table[key] = value
    return Config.model_validate(tree)


def problems_of_values(entries: Entries) -> list[Problem]:
    """Returns values that are wrong by themselves, whatever other keys say."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for detail in _details(entries) if entries else ():
        # Another source may bring a missing key, and repair a contradiction, which has no location.
        if detail["loc"] and not (detail["type"] == "missing" and len(detail["loc"]) <= 2):
            by_key.setdefault(_key_of(detail["loc"]), []).append(detail)
    return [Problem(key, entries[key][1], _wrong_value(key, found)) for key, found in by_key.items()]


def problems_of_all(merged: Entries, broken: set[str]) -> list[Problem]:
    """Returns missing keys and contradictions of all sources, without those about `broken` keys, reported already."""
    missing = [key for key in all_keys().values() if key.required and key.name not in merged]
    absent = [key for key in missing if not {key.name, key.name.partition(".")[0]} & broken]
    found = [Problem(key.name, "", f"has no default: write it. {_first_sentence(key.doc)}") for key in absent]
    complete = {**merged, **{key.name: ("?", "") for key in missing}}
    causes = [detail.get("ctx", {}).get("error") for detail in _details(complete)]
    for problem in (problem for cause in causes if isinstance(cause, Incoherent) for problem in cause.problems):
        keys = (problem.key, *problem.others)
        if not any(key == name or key.startswith(f"{name}.") for key in keys for name in broken):
            places = [f"{key} ({merged[key][1]})" for key in keys if key in merged]
            found.append(replace(problem, where=", ".join(places)))
    return sorted(found, key=lambda problem: problem.key)


def _first_sentence(doc: str) -> str:
    return doc.partition(". ")[0].removesuffix(".") + "."


def _details(entries: Entries) -> list[ErrorDetails]:
    """Returns everything that validation complains about."""
    try:
        config_of(entries)
    except ValidationError as error:
        return error.errors()
    return []


def _key_of(location: tuple[int | str, ...]) -> str:
    for length in (2, 1):
        if (name := ".".join(str(part) for part in location[:length])) in all_keys():
            return name
    raise AssertionError(f"validation complains about {location}, which is no key")


def _wrong_value(key: str, details: Sequence[ErrorDetails]) -> str:
    """Joins all complaints about one value; validation complains once for each member of a union."""
    by_place: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_place.setdefault(_place_in_list(detail["loc"][1 + key.count(".") :]), []).append(detail)
    is_secret = all_keys()[key].is_secret
    told = "; ".join(
        place + " or ".join(dict.fromkeys(map(_complaint, found))) + ("" if is_secret else _instead_of(found[-1]))
        for place, found in by_place.items()
    )
    first = details[0]
    if key == "algorithm.preset" and first["input"] in OFFLINE:
        wrong = told.partition("; did you mean")[0]
        return f"{wrong}; {first['input']} trains on stored answers, and asyncrl on sampled ones"
    if key == "generation.temperature" and first["type"] == "greater_than" and float(first["input"]) == 0:
        return f"{told}; greedy answers are for evaluation: write evaluate.temperature = 0"
    return told


def _place_in_list(location: Iterable[int | str]) -> str:
    """Returns where in a list the wrong value is, without the names that validation gives to members of a union."""
    union = ("constrained-", "literal[", "int", "str", SOURCES, SOURCE)
    parts = [f"item {part + 1}" if isinstance(part, int) else part for part in location]
    return "".join(f"{part}: " for part in parts if not part.startswith(union))


def _complaint(detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        names = [str(part) for part in detail["loc"][:-1]]
        found = (TABLES[name] for name in (".".join(names[:2]), *names) if name in TABLES)
        return f"there is no such key; {_meant(str(detail['loc'][-1]), next(found, RewardFunction))}"
    if text := FORMS.get(detail["type"]):
        return text
    if detail["type"] in ("too_short", "too_long"):
        bound = detail["ctx"].get("min_length", detail["ctx"].get("max_length"))
        return f"must have {bound} or {'more' if detail['type'] == 'too_short' else 'fewer'} entries"
    message = detail["msg"].replace("Input should be", "must be").split(", unable to parse", 1)[0]
    message = message.removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _meant(key: str, table: type[BaseModel]) -> str:
    """Returns what to write instead of a key that a table does not have."""
    if table is LayoutConfig and key in AXES_OF_TRAINER:
        return f"only training.layout has {key}: write {', '.join(table.model_fields)}"
    near = WORDS.get(key, key)
    near = near if near in table.model_fields else closest(key, table.model_fields) or ""
    if not near and table is RewardFunction:
        return f"arguments of a function stand in its options: options = {{ {key} = ... }}"
    return f"did you mean {near}?" if near else f"there are {', '.join(table.model_fields)}"


def refuse_unknown_keys(function: Mapping[str, Any]) -> None:
    """Raises ConfigError for keys of a reward function from Python that do not exist."""
    for key in function:
        if key not in RewardFunction.model_fields:
            raise ConfigError(f"reward: {key}: there is no such key; {_meant(key, RewardFunction)}")


def _instead_of(last: ErrorDetails) -> str:
    if last["type"] in ("extra_forbidden", "missing"):
        return ""
    given = last["input"]
    if last["type"] in ("tuple_type", "list_type"):
        return f", not {_shown(given)}" + (f"; write [{_shown(given)}]" if given is not None else "")
    if last["type"] in ("int_parsing", "float_parsing") and (number := _NUMBER.fullmatch(str(given))):
        return f", not {given!r}; write a number without {number[2] or 'an exponent'}"
    expected = str(last.get("ctx", {}).get("expected", ""))
    choices = [choice.strip("' ") for choice in expected.replace(" or ", ",").split(",")]
    near = closest(str(given), choices) if len(choices) > 1 else None
    shown = _shown(given) if isinstance(given, dict | bool) else repr(given)
    return f", not {shown}" + (f"; did you mean {near}?" if near else "")


def _shown(value: Any) -> str:
    """Returns a value as TOML has it, or as Python has it if it comes from there."""
    try:
        return value_text(value)
    except (TypeError, ValueError):
        return repr(value)


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
