"""Checks and holds the rows that prompts come from, of one source or of several."""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import floor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncrl.config.user_code import suggestion
from asyncrl.config.written_values import written_or
from asyncrl.errors import TaskError
from asyncrl.protocols.prompt_row import PromptRow
from asyncrl.tasks.chat_messages import (
    TOOLS,
    Messages,
    as_messages,
    in_one_form,
    no_prompt,
    parsed,
    plain_messages,
    tools_of,
    without_answer,
)
from asyncrl.tasks.pictures import has_pictures
from asyncrl.tasks.row_files import ArrowRows, JoinedRows, located, place_of, unchecked

# Makes plain values of what rows hold, which can be sent to other processes.


DEEPEST = 100
"""Lists and tables in each other; messages between processes hold some more."""
SMALLEST = -(2**63)
LARGEST = 2**64 - 1
"""Bounds of whole numbers in messages between processes."""


def plain(value: Any, where: str, depth: int = DEEPEST) -> Any:
    """Converts `value` to None, bool, int, float, str, bytes, lists and dicts. Dates and times become text (ISO 8601),
    and so do decimals; raises TaskError, which begins with `where`, if it holds something else."""
    if type(value) is str:  # Most values are texts.
        return valid_text(value, where)
    match value:
        case None | bool() | float() | bytes():
            return value
        case str():
            return valid_text(value, where)
        case int():
            if SMALLEST <= value <= LARGEST:
                return value
            raise TaskError(f"{where}: a number of {value.bit_length()} bits; up to 64 can be sent: write it as text")
        case np.datetime64() | Decimal():
            return str(value)
        case np.ndarray() | np.generic():
            return plain(value.tolist(), where, depth)
        case datetime() | date() | time():
            return value.isoformat()
        case list() | tuple() | Mapping() if depth == 0:
            raise TaskError(f"{where}: over {DEEPEST} lists and tables lie in each other: write them as text")
        case list() | tuple():
            return [plain(item, where, depth - 1) for item in value]
        case Mapping():
            return {valid_text(str(key), where): plain(item, where, depth - 1) for key, item in value.items()}
    kind = type(value).__name__
    _, is_column, name = where.rpartition(", column ")
    advice = f', or leave it out: task.columns = {{ "{name}" = "" }}' if is_column else ""
    text = f"a value of type {kind} cannot be sent to reward functions; make it text or numbers"
    raise TaskError(f"{where}: {text}{advice}")


def valid_text(text: str, where: str) -> str:
    """Returns a text that has UTF-8; raises TaskError, which begins with `where`, for half of a surrogate pair."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise TaskError(
            f"{where}: character {error.start + 1} is {half}, half of a character that was cut apart: remove it"
        ) from None
    return text


COLUMNS = "task.columns"
"""Config key that names columns."""
MOST_CHECKED = 10_000
"""Rows that are looked at before a run starts, of a source that makes them on demand."""
CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns of other libraries with whole conversations, which end with the wanted answer."""
OTHER_NAMES = ("prompts", "question", "problem", "query", "instruction", "input", *CONVERSATIONS, "text")
"""Names that other libraries give to the column `prompt`."""


class Row(NamedTuple):
    """One row. prompt: text or chat messages. columns: the row in plain values; rewards get it as `sample.row`."""

    prompt: Messages
    columns: PromptRow


class PromptRows(Protocol):
    """Rows that groups are drawn from, by number, from 0. source: its name in messages. notes: lines for the user about
    what was read."""

    @property
    def source(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """Returns a row; raises TaskError if it has no prompt, or a value that cannot be sent to another process."""

    def where(self, number: int) -> str:
        """Returns source and row in words; rows of files are lines, and both count from 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Holds rows by number. source: its name in messages. system: message put before every prompt. named: columns of
    the rows by the names that they get; "" leaves a column out. chat: prompts that are text become messages. folder:
    where paths of pictures begin."""

    rows: Sequence[Mapping[str, Any]]
    source: str
    system: str = ""
    named: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    chat: bool = False
    folder: Path = Path()

    def __post_init__(self) -> None:
        if len(self.rows) == 0:
            raise TaskError(f"{self.source}: there are no rows")
        for number in unchecked(self.rows, self.named.get("prompt", "prompt")):
            self.row(number)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, number: int) -> str:
        return f"{self.source}, {place_of(self.rows, number)}"

    def row(self, number: int) -> Row:
        raw = self.rows[number]
        where = self.where(number)
        if not isinstance(raw, Mapping):
            raise TaskError(f'{where}: a row is a table such as {{"prompt": ...}}, this is {type(raw).__name__}')
        named = self._with_names(raw, where) if self.named else raw
        if "prompt" not in named:
            raise TaskError(f"{where}: {self._no_prompt(named)}")
        is_whole = self.named.get("prompt", "").rpartition(".")[2] in CONVERSATIONS
        return checked_row(named, where, self.system, self.chat, self.folder, is_whole=is_whole)

    def _no_prompt(self, row: Mapping[str, Any]) -> str:
        """Returns what to do about a row without a prompt, which the first row may have."""
        if "prompt" not in self.rows[0]:
            return _no_prompt(list(row))
        near = [name for name in map(str, row) if name.strip().lower() == "prompt"]
        advice = f', and "{near[0]}" is another name: write "prompt"' if near else ""
        found = ", ".join(map(str, row)) or "no columns"
        return f'there is no column "prompt"; found are {found}; {place_of(self.rows, 0)} has it{advice}'

    def first(self, count: int) -> list[tuple[Messages, dict[str, Any]]]:
        """Returns up to `count` rows from the beginning."""
        return [self.row(number) for number in range(min(count, len(self)))]

    def _with_names(self, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Returns a row with the columns that `named` gives another name, beside those that it has."""
        named = {name: column for name, column in self.named.items() if column}
        found = {name: _column(raw, column, f"{where}: {COLUMNS}.{name}") for name, column in named.items()}
        return {name: value for name, value in {**raw, **found}.items() if self.named.get(name, name)}


@dataclass(frozen=True)
class MixedPrompts:
    """The rows of several sources, numbered one source after the other. weights: shares of the sources in the groups;
    none: each row is drawn equally often."""

    parts: tuple[PromptRows, ...]
    weights: tuple[float, ...] = ()

    @property
    def source(self) -> str:
        return ", ".join(part.source for part in self.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for part in self.parts for note in part.notes)

    @cached_property
    def ends(self) -> list[int]:
        """Returns the number behind the last row of each source."""
        return list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self.ends[-1]

    def row(self, number: int) -> Row:
        part, place = located(self.ends, number)
        return self.parts[part].row(place)

    def where(self, number: int) -> str:
        part, place = located(self.ends, number)
        return self.parts[part].where(place)


def checked_row(
    raw: Mapping[str, Any],
    where: str,
    system: str = "",
    chat: bool = False,
    folder: Path = Path(),
    *,
    is_whole: bool = False,
) -> Row:
    """Returns a row in plain values; raises TaskError, which begins with `where`, if it has no prompt. chat: a prompt
    that is text becomes a message of the user. folder: where paths of pictures begin. is_whole: the prompt may be a
    whole conversation, whose last answer is the column `answer` of a row that has none."""
    if "prompt" not in raw:
        raise TaskError(f"{where}: {_no_prompt(list(raw))}")
    columns = {valid_text(str(name), where): plain(each, f"{where}, column {name}") for name, each in raw.items()}
    columns["prompt"] = in_one_form(parsed(columns["prompt"], where), where)
    if is_whole:
        columns["prompt"], answer = without_answer(columns["prompt"], where)
        columns = ({"answer": answer} if answer else {}) | columns
    if mistake := no_prompt(columns["prompt"]):
        form = 'a prompt is text that is not empty, or a list of {"role": ..., "content": ...}, not all empty'
        raise TaskError(f"{where}: {form}; {mistake}")
    prompt = with_system(columns["prompt"], system, where, chat, folder)
    if has_pictures(prompt):
        columns["prompt"] = prompt[1:] if system else prompt  # As files or data URIs, which every reader can show.
    if tools := tools_of(columns, isinstance(prompt, str), where):
        columns[TOOLS] = tools
    return Row(prompt, PromptRow(columns))


def with_system(prompt: Messages, system: str, where: str, chat: bool = False, folder: Path = Path()) -> Messages:
    """Returns a prompt with the system message before it; "" is none. Raises TaskError, which begins with `where`, for
    a prompt that has a system message of its own, or content that is no text and no picture. chat: a text becomes a
    message too."""
    if isinstance(prompt, str):
        return as_messages(prompt, system) if system or chat else prompt
    messages = plain_messages(prompt, where, folder)
    if not system:
        return messages
    if any(message["role"] == "system" for message in messages[:1]):
        raise TaskError(f"{where}: the prompt has a system message of its own; remove task.system")
    return [{"role": "system", "content": system}, *messages]


def checked_rows(rows: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many rows are looked at before a run starts: all that a file or a list has."""
    return len(rows) if isinstance(rows, list | ArrowRows | JoinedRows) else min(len(rows), MOST_CHECKED)


def has_column(raw: Mapping[str, Any], column: str) -> bool:
    """Returns whether a row has this column, which may be nested."""
    try:
        _column(raw, column, "")
    except TaskError:
        return False
    return True


def _column(raw: Mapping[str, Any], column: str, where: str) -> Any:
    """Returns a column; one whose name has dots may be nested."""
    if column in raw:
        return raw[column]
    found: Any = raw
    for name in column.split("."):
        found = written_or(found, lambda read: isinstance(read, Mapping))  # Files without tables hold them as text.
        if not isinstance(found, Mapping) or name not in found:
            raise TaskError(f"{where}: there is no column {column}{suggestion(column, map(str, raw))}")
        found = found[name]
    return found


def _no_prompt(found: list[str]) -> str:
    near = difflib.get_close_matches("prompt", found, 1, 0.6) or [name for name in OTHER_NAMES if name in found]
    closest = f"; name it by {COLUMNS}"
    if near:
        whole = ", of which all before its last answer is asked" if near[0] in CONVERSATIONS else ""
        closest = f'; the closest is "{near[0]}"{whole}: write {COLUMNS} = {{ prompt = "{near[0]}" }}'
    return (
        f'there is no column "prompt"; found are {", ".join(found) or "no columns"}{closest}'
        ", or write a function FILE.py:NAME that returns rows with a prompt"
    )


# Draws the row of each group, as a pure function of seed and group id.


ROUNDS = 6
"""Rounds of the permutation that orders the rows of an epoch."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Returns the row of a group: each epoch has every row of a source once, in another order, or always in the order
    of the source where `shuffle` is false. Sources with weights have epochs of their own."""

    prompts: PromptRows
    seed: int
    shuffle: bool = True

    def __call__(self, group: int) -> Row:
        return self.prompts.row(self.number(group))

    def where(self, group: int) -> str:
        """Returns source and row of a group in words."""
        return self.prompts.where(self.number(group))

    def number(self, group: int) -> int:
        """Returns the number of the row of a group."""
        if not isinstance(self.prompts, MixedPrompts) or not self.prompts.weights:
            return self._place(group, len(self.prompts))
        part, turn = drawn_part(self.prompts.weights, group)
        rows = len(self.prompts.parts[part])
        return self.prompts.ends[part] - rows + self._place(turn, rows)

    def _place(self, group: int, rows: int) -> int:
        return drawn_row(self.seed, group, rows) if self.shuffle else group % rows


def drawn_part(weights: Sequence[float], group: int) -> tuple[int, int]:
    """Returns the source of a group, and how many groups before it have the same one. Among the first n groups each
    source has its share of n within one group for each source before it, so that batches are mixed alike: the groups of
    the first one are a Beatty sequence, those of the second one a Beatty sequence of what is left, and so on."""
    left = sum(map(Fraction, weights))
    for part, weight in enumerate(weights[:-1]):
        share = Fraction(weight) / left
        before = floor(group * share)
        if floor((group + 1) * share) > before:
            return part, before
        group -= before
        left -= Fraction(weight)
    return len(weights) - 1, group


def drawn_row(seed: int, group: int, rows: int) -> int:
    """Returns the row of `group` (>= 0) among `rows`; each epoch of `rows` groups is a permutation. A Feistel network
    over the smallest even number of bits that holds all rows is applied until it gives a row (Black and Rogaway,
    Ciphers with arbitrary finite domains, CT-RSA 2002, methods 2 and 3): no table, O(1) memory."""
    assert group >= 0
    assert rows > 0
    epoch, place = divmod(group, rows)
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    while True:
        place = _feistel(place, half, f"{seed}:{epoch}")
        if place < rows:
            return place


def _feistel(value: int, half: int, key: str) -> int:
    """Permutes the integers below 4 ** half."""
    mask = (1 << half) - 1
    left = value >> half
    right = value & mask
    for number in range(ROUNDS):
        digest = hashlib.blake2b(f"{key}:{number}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half | right
