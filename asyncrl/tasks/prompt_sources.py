"""Reads prompts, and texts to learn besides samples, from files, the hub, reasoning-gym, functions and Python."""

import csv
import inspect
import io
import json
import re
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.install_hints import install_extra
from asyncrl.config.schema import Config, TaskConfig
from asyncrl.config.user_code import resolve, suggestion
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks.human_eval import SOURCE as HUMAN_EVAL
from asyncrl.tasks.human_eval import human_eval
from asyncrl.tasks.prompt_rows import Prompts, plain

Rows = Sequence[Mapping[str, Any]]
TRAINING_SEED, HELD_OUT_SEED = 0, 1
"""Default seeds of procedural sources. The run's seed is another one, which orders the rows."""

HELD_OUT_SHARE = 8
"""Every eighth question of a reasoning-gym data set is held out."""


def training_prompts(config: Config, given: Rows | None = None) -> Prompts:
    """Reads the training prompts. given: rows from Python instead of `task.prompts`."""
    task = config.task
    options = {"size": task.size, "seed": TRAINING_SEED, **task.options}
    return load_prompts(task.prompts if given is None else given, options, task.system)


def held_out_prompts(config: Config, given: str | Rows | None = None, name: str = "") -> Prompts | None:
    """Reads the prompts of a held-out set; None where it has none. given: read instead of those."""
    chosen = config.evaluate.set_named(name)
    spec = chosen.prompts if given is None else given
    if not spec and given is None:
        return None
    options = {"size": chosen.size, "seed": HELD_OUT_SEED, **chosen.options}
    with _mistakes_of(chosen.section):
        return load_prompts(spec, options, config.task.system, held_out=True)


@contextmanager
def _mistakes_of(section: str) -> Iterator[None]:
    """Names the keys of this section in mistakes, where readers name those of the section `task`."""
    try:
        yield
    except (TaskError, ConfigError) as error:
        text = re.sub(r"\btask\.(prompts|options)\b", rf"{section}.\1", str(error))
        key = f"{section}.prompts"
        raise TaskError(text if text.startswith(f"{section}.") else f"{key}: {text}") from error.__cause__


def load_prompts(
    spec: str | Rows, options: Mapping[str, Any] | None = None, system: str = "", held_out: bool = False
) -> Prompts:
    """Reads the prompts of `spec`, a form of `task.prompts`, a list of dicts or a datasets.Dataset; raises TaskError if
    there is no such source, or its rows have no prompts. options: keyword arguments of a procedural source, `size` and
    `seed` among them. system: message put before each prompt. held_out: takes held-out questions of reasoning-gym."""
    if not isinstance(spec, str):
        return Prompts(_given(spec), "the rows given as prompts", system)
    return Prompts(_read(spec, dict(options or {}), held_out), spec, system)


def write_texts(path: Path, task: TaskConfig) -> None:
    """Writes the rows of `task.pretrain` to `path` for the trainer, one JSON object a line."""
    rows = pretraining_rows(task)
    with path.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row) + "\n")


def pretraining_rows(task: TaskConfig) -> list[dict[str, Any]]:
    """Reads the rows of `task.pretrain`: {text}, {prompt, answer}, TRL's {prompt, completion}, or {messages}, of which
    the last is learnt; raises TaskError if there is no such source, or no row, or a row has other columns."""
    key, source = "task.pretrain", task.pretrain
    try:
        rows = _read(source, {"size": task.size, "seed": TRAINING_SEED}, held_out=False)
    except TaskError as error:
        text = str(error).replace("task.prompts", key)
        raise TaskError(text if text.startswith("task.") else f"{key}: {text}") from None
    if len(rows) == 0:
        raise TaskError(f"{key}: {source}: there are no rows")
    return [_text_row(rows[number], f"{key}: {source}, row {number}", task.system) for number in range(len(rows))]


def _text_row(row: Mapping[str, Any], where: str, system: str) -> dict[str, Any]:
    match dict(row):
        case {"text": str(text)} if text:
            return {"text": text}
        case {"prompt": _, "completion": str(answer) | [{"role": "assistant", "content": str(answer)}]} if answer:
            return {"prompt": Prompts([row], where, system).row(0).prompt, "answer": answer}
        case {"prompt": _, "answer": str(answer)} if answer and "completion" not in row:
            return {"prompt": Prompts([row], where, system).row(0).prompt, "answer": answer}
        case {"messages": [*asked, {"role": "assistant", "content": str(answer)}]} if asked and answer:
            return {"prompt": Prompts([{"prompt": asked}], where, system).row(0).prompt, "answer": answer}
        case {"text": ""} | {"prompt": _, "answer": ""} | {"prompt": _, "completion": ""}:
            column = next(name for name in ("text", "completion", "answer") if row.get(name) == "")
            raise TaskError(f"{where}: its `{column}` is empty, so there is nothing to learn; remove the row")
    found = ", ".join(map(str, row))
    names = "a `text`, a `prompt` with an `answer` or a `completion`, or `messages`"
    raise TaskError(f"{where}: a row has {names}; found are {found}")


def _read(spec: str, options: dict[str, Any], held_out: bool) -> Rows:
    kind, colon, rest = spec.partition(":")
    if colon and kind == "hub":
        return _hub(rest, options)
    if colon and kind == "reasoning_gym":
        return _reasoning_gym(rest, options, held_out)
    if colon and kind == HUMAN_EVAL:
        if not held_out:
            raise TaskError("task.prompts: HumanEval is for evaluation only; write it as evaluate.prompts")
        return human_eval(rest, **options)
    if reader := READERS.get(Path(spec).suffix.lower()):
        return _from_file(reader, Path(spec).expanduser())
    if ":" in spec:
        return _function(spec, options)
    raise TaskError(
        f'task.prompts: "{spec}" is no source of prompts; write a file ending in {", ".join(READERS)}, '
        f"hub:NAME, reasoning_gym:NAME{f', {HUMAN_EVAL}:' if held_out else ''} or FILE.py:function"
    )


def _given(rows: Any) -> Rows:
    """Checks rows from Python: a list, a tuple, or an object with rows by number, e.g. a datasets.Dataset."""
    of_a_frame = "; of a pandas.DataFrame write frame.to_dict('records')" if hasattr(rows, "iloc") else ""
    if isinstance(rows, Mapping | bytes) or not hasattr(rows, "__getitem__") or of_a_frame:
        raise TaskError(
            f'prompts: write a form of task.prompts, a list of rows such as {{"prompt": ...}} or a datasets.Dataset, '
            f"this is {type(rows).__name__}{of_a_frame}"
        )
    return list(rows) if isinstance(rows, list | tuple) else rows


def _from_file(reader: Callable[[Path], Rows], path: Path) -> Rows:
    if not path.is_file():
        others = [other for other in path.parent.glob("*") if other.is_file()]
        readable = sorted(other.name for other in others if other.suffix.lower() in READERS)
        raise TaskError(f"task.prompts: there is no file {path}{suggestion(path.name, readable)}")
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise TaskError(
            f"{path}, line {line}: this is no UTF-8 text (byte 0x{error.object[error.start]:02x}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise TaskError(f"task.prompts: {path} cannot be read: {error.strerror or error}") from error


def _text(path: Path) -> str:
    """Reads text without the byte order mark that some programs write."""
    return path.read_bytes().decode("utf-8-sig")


def _jsonl(path: Path) -> Rows:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{where}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise TaskError(f'{where}: a row is an object such as {{"prompt": ...}}, this is {line.strip()[:80]}')
        rows.append(row)
    return rows


def _csv(path: Path) -> Rows:
    try:
        rows = list(csv.DictReader(io.StringIO(_text(path), newline="")))
    except csv.Error as error:
        raise TaskError(f"{path} is no CSV that can be read: {error}") from None
    for number, row in enumerate(rows):
        if None in row or None in row.values():
            raise TaskError(f"{path}, row {number}: it has not as many fields as the header has columns")
    return rows


@dataclass(frozen=True, slots=True)
class ArrowRows(Sequence[Mapping[str, Any]]):
    """Makes rows of an Arrow table one by one; verl's files are such tables with nested columns."""

    table: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, number: Any) -> Any:
        return self.table.slice(number, 1).to_pylist()[0]


def _parquet(path: Path) -> Rows:
    parquet = _optional("pyarrow.parquet", "parquet")
    try:
        return ArrowRows(parquet.read_table(path))
    except (_optional("pyarrow", "parquet").ArrowException, OSError) as error:
        raise TaskError(f"task.prompts: {path} is no Parquet file that can be read: {error}") from error


READERS: dict[str, Callable[[Path], Rows]] = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}


def _hub(name: str, options: dict[str, Any]) -> Rows:
    """Loads a data set of the hub; options except `size` and `seed` go to `datasets.load_dataset`."""
    name, _, split = name.partition("#")
    if not name:
        raise TaskError('task.prompts: "hub:" names no data set; write hub:NAME or hub:NAME#SPLIT')
    datasets = _optional("datasets", "hub")
    arguments = {key: value for key, value in options.items() if key not in ("size", "seed")}
    try:
        rows: Rows = datasets.load_dataset(name, split=split or "train", **arguments)
    except (ValueError, OSError) as error:
        raise TaskError(f"task.prompts: hub:{name} could not be loaded: {error}") from error
    return rows


def _reasoning_gym(name: str, options: dict[str, Any], held_out: bool) -> Rows:
    """Makes up to `size` rows; a checksum of the question decides whether it is held out. Seeds cannot separate the two
    kinds, because entry i of seed s is often entry i - 1 of seed s + 1."""
    gym = _optional("reasoning_gym", "tasks")
    known = _optional("reasoning_gym.factory", "tasks").DATASETS
    if name not in known:
        raise TaskError(f"task.prompts: reasoning-gym has no data set {name}{suggestion(name, list(known))}")
    wanted = options.get("size", 1000)
    options = {**options, "size": 4 * HELD_OUT_SHARE * wanted}
    try:
        entries = gym.create_dataset(name, **options)
    except (TypeError, AssertionError) as error:
        raise TaskError(f"task.options: reasoning_gym:{name} does not take {options}: {error}") from error
    # A row names its entry; the scorer makes the entry again, because its metadata may not be plain.
    origin = {"name": name, "options": plain(options, "task.options")}
    rows = (
        {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": {**origin, "index": number}}
        for number, entry in enumerate(entries)
        if (zlib.crc32(entry["question"].encode()) % HELD_OUT_SHARE == 0) == held_out
    )
    return list(islice(rows, wanted))


def _function(spec: str, options: dict[str, Any]) -> Rows:
    try:
        function = resolve(spec, "task.prompts")
        if not callable(function):
            raise TaskError(f"task.prompts: {spec} is no function")
        made = function(**_accepted(function, options, spec))
        if isinstance(made, Iterable) and not hasattr(made, "__getitem__"):
            return list(islice(made, options.get("size")))
    except (ConfigError, TaskError):
        raise
    except Exception as error:  # the user's code, which may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}"
        raise TaskError(f"task.prompts: {spec} raised {type(error).__name__}: {error} ({where})") from error
    if isinstance(made, str | bytes | Mapping) or not hasattr(made, "__getitem__"):
        raise TaskError(
            f"task.prompts: {spec} returned {made!r:.80}; a function of prompts returns a list of rows, or yields them"
        )
    return list(made) if isinstance(made, list | tuple) else made


def _accepted(function: Callable[..., Any], options: dict[str, Any], spec: str) -> dict[str, Any]:
    """Returns the options that the function takes; size and seed need not be among its parameters."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    for name in options:
        if name not in parameters and name not in ("size", "seed"):
            raise TaskError(f"task.options: {spec} takes no {name}{suggestion(name, parameters)}")
    return {name: value for name, value in options.items() if name in parameters}


def _optional(module: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != missing:
            raise
        raise TaskError(f"task.prompts: {missing} is not installed; run: {install_extra(extra)}") from None
