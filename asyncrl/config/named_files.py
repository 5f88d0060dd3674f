"""Files that a config names: which folder a relative path begins in, and what a run reads."""

import os
import re
import site
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.sections.named_values import IN_SETS, OF_PACKAGES, SCHEMES, WARMED, Named
from asyncrl.config.user_code import file_of_module, imported_files

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Endings of files with rows."""
COMPRESSED = ".gz"
"""Ending behind that of a compressed file with rows. Parquet compresses its own."""
PACKAGE = Path(__file__).parents[1]

_CODE = re.compile(r"((?:trl:|verl:)?)(.+\.py)(:\w+)", re.DOTALL)


@cache
def naming_keys() -> Mapping[str, Named]:
    """Returns the keys whose values may name files, in the order of the config."""
    from asyncrl.config.schema import Config  # not where children import this: they do without pydantic

    sections = {name: getattr(field.annotation, "model_fields", {}) for name, field in Config.model_fields.items()}
    inner = ((f"{name}.{key}", each) for name, fields in sections.items() for key, each in fields.items())
    return {key: mark for key, each in inner for mark in each.metadata if isinstance(mark, Named)}


def _has_scheme(kind: Named, value: str) -> bool:
    """Returns whether the beginning of a value says that it names no file: `agent:COMMAND`, `hub:NAME`, an address. It
    is asked before anything else about the value."""
    return "://" in value or (":" in value and value.partition(":")[0] in SCHEMES.get(kind, ()))


def is_of_gymnasium(env: str) -> bool:
    """Says whether Gymnasium makes an environment, and not a function of the user."""
    source, _, name = env.rpartition(":")
    return not source or "-v" in name


def anchored(key: str, value: Any, folder: Path) -> Any:
    """Returns the value of a key with relative paths in it made absolute, as seen from `folder`. Commands stay."""
    return _with_paths(naming_keys().get(key), value, folder, lambda path: _absolute(path, folder))


def without_paths(key: str, value: Any) -> Any:
    """Returns the value of a key without the paths of its files: what is left of FILE.py:NAME is :NAME."""
    return _with_paths(naming_keys().get(key), value, Path(), lambda path: "")


def _with_paths(kind: Named | None, value: Any, folder: Path, change: Callable[[str], str]) -> Any:
    """Returns a value with its paths changed. folder: where relative ones begin."""
    match kind, value:
        case Named.FOLDERS, list() | tuple():
            return [change(each) if isinstance(each, str) else each for each in value]
        case Named.FUNCTIONS | Named.ROWS, list() | tuple():
            return [_with_path_of_use(kind, each, folder, change) for each in value]
        case Named.TOOLS, Mapping() if isinstance(tools := value.get("functions"), list):
            return {**value, "functions": [_with_path_of_use(kind, each, folder, change) for each in tools]}
        case Named.SETS, Mapping():
            return {name: _set_with_paths(each, folder, change) for name, each in value.items()}
        case Named.FOLDER, str():
            return value and change(value)
        case Named.MODEL, str() if value.startswith(WARMED):
            return f"{WARMED}{_source_with_path(kind, value.removeprefix(WARMED), folder, change)}"
        case Named.MODEL, str() if not _has_scheme(kind, value):
            is_path = value.startswith((".", "/", "~")) or (value != "" and (folder / value).is_dir())
            return change(value) if is_path else value
        case Named.ROWS | Named.CODE | Named.ENVIRONMENT, str():
            return _source_with_path(kind, value, folder, change)
    return value


def _set_with_paths(value: Any, folder: Path, change: Callable[[str], str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {part: _with_paths(IN_SETS.get(part), each, folder, change) for part, each in value.items()}


def _with_path_of_use(kind: Named, value: Any, folder: Path, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping) and isinstance(value.get("use"), str):
        return {**value, "use": _source_with_path(kind, value["use"], folder, change)}
    return _source_with_path(kind, value, folder, change) if isinstance(value, str) else value


def _source_with_path(kind: Named, value: str, folder: Path, change: Callable[[str], str]) -> str:
    """Changes the path of FILE.py:NAME and, where rows are named, of a file or folder of them; other sources stay."""
    if _has_scheme(kind, value):
        return value
    if match := _CODE.fullmatch(value):
        return f"{match[1]}{change(match[2])}{match[3]}"
    is_rows = kind is Named.ROWS and (data_suffix(value) or data_folder(value, folder))
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
    if _has_scheme(Named.ROWS, source):
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
    found = ((key, *each) for key, kind in naming_keys().items() for each in _sources_in(kind, attrgetter(key)(config)))
    of_files = ((key, source) for key, kind, source in found if not _has_scheme(kind, source))
    return [(key, source.removeprefix("trl:").removeprefix("verl:")) for key, source in of_files]


def _sources_in(kind: Named, value: Any) -> Iterator[tuple[Named, str]]:
    """Yields the sources of rows and code in the value of a key, each with what it may be."""
    match kind, value:
        case Named.ROWS | Named.CODE | Named.ENVIRONMENT, str():
            yield kind, value
        case Named.ROWS | Named.FUNCTIONS, tuple():
            yield from ((kind, each.use) for each in value)
        case Named.TOOLS, {"functions": [*tools]}:
            yield from ((kind, each) for each in tools if isinstance(each, str))
        case Named.SETS, _:
            parts = ((inner, getattr(each, part)) for each in value.values() for part, inner in IN_SETS.items())
            yield from (source for part in parts for source in _sources_in(*part))


def is_read_by(key: str, service: str) -> bool:
    """Returns whether a service runs the code of a key. Rewards of held-out sets are run where the others are."""
    return key.partition(".")[0] == service or (naming_keys()[key] is Named.SETS and service == "reward")


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
