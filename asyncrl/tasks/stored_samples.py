"""Samples in a Parquet file: written from a run's samples.jsonl, and read to train from them again.

    samples.jsonl, rows of the prompts ──> write_samples ──> FILE.parquet ──> StoredSamples ──> generation

Columns of a sample: `prompt` (text or chat messages) and `completion`, which are TRL's names; its tokens; where it
comes from; and the other columns of its prompt's row. For verl `messages`, `data_source`, `reward_model` and
`extra_info` come instead.
"""

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import TaskError
from asyncrl.tasks.prompt_rows import Row
from asyncrl.tasks.row_files import optional_module
from asyncrl.telemetry.samples_file import SampleRecord

ColumnNames = Literal["asyncrl", "verl"]
COPIED = ("step", "incarnation", "group", "member", "attempt", "finish", "tokens", "reward", "advantage")
OLDEST = "first_version"
NEWEST = "last_version"
NEEDED = ("prompt_ids", "completion_ids", "logprobs", "group", "member", "finish", "completion")
"""Columns without which stored samples cannot be trained."""
SCHEMA_KEY = b"asyncrl"


def write_samples(
    path: Path,
    run: str,
    records: Sequence[SampleRecord],
    row_of: Callable[[int], Row | None],
    names: ColumnNames = "asyncrl",
) -> list[str]:
    """Writes one row for each sample; returns the columns that were written as JSON, because their values differ in
    type. run: its name. row_of: returns the row of a group's prompt, None where it is unknown. The file appears at
    once. Raises TaskError without pyarrow, and OSError."""
    arrow = optional_module("pyarrow", "parquet", "")
    parquet = optional_module("pyarrow.parquet", "parquet", "")
    make = _verl_row if names == "verl" else _own_row
    rows = [make(run, record, _checked(row_of(record.group), record)) for record in records]
    columns, as_json = _arrays(arrow, rows)
    table = arrow.table(columns).replace_schema_metadata({SCHEMA_KEY: b"samples"})
    unfinished = path.with_name(f"{path.name}.part")
    parquet.write_table(table, unfinished, compression="zstd")
    os.replace(unfinished, path)
    return as_json


def _checked(row: Row | None, record: SampleRecord) -> Row | None:
    """Returns the row if the sample has its prompt, else None: the file of prompts may have changed since."""
    if row is None:
        return None
    asked = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
    return row if isinstance(asked, str) and asked.strip() in record.prompt else None


def _own_row(run: str, record: SampleRecord, row: Row | None) -> dict[str, Any]:
    prompt = record.prompt if row is None else row.prompt
    is_chat = not isinstance(prompt, str) or bool(record.turns)
    own = {
        "prompt": [_user(prompt)] if is_chat and isinstance(prompt, str) else prompt,
        "completion": _answered(record) if is_chat else record.text,
        "prompt_ids": record.prompt_ids,
        "completion_ids": record.token_ids,
        "logprobs": record.token_logprobs,
        "versions": record.token_versions,
        "run": run,
        **{name: getattr(record, name) for name in COPIED},
        OLDEST: record.first,
        NEWEST: record.last,
        "trained_tokens": record.trained,
        "terms": json.dumps(dict(record.terms)),
        "turns": json.dumps(record.turns) if record.turns else "",
    }
    others = {} if row is None else {name: value for name, value in row.columns.items() if name != "prompt"}
    if {"completion_ids", "prompt_ids"} <= {*others}:  # The row is a sample of another run's file.
        others = {name: value for name, value in others.items() if name not in own}
    return {**{f"row_{name}" if name in own else name: value for name, value in others.items()}, **own}


def _verl_row(run: str, record: SampleRecord, row: Row | None) -> dict[str, Any]:
    prompt: Any = record.prompt if row is None else row.prompt
    asked = [_user(prompt)] if isinstance(prompt, str) else prompt
    columns = {} if row is None else dict(row.columns)
    given = columns.get("reward_model")
    truth = given.get("ground_truth") if isinstance(given, Mapping) else columns.get("answer")
    return {
        "data_source": str(columns.get("data_source", f"asyncrl/{run}")),
        "prompt": [_message(each) for each in asked],
        "messages": [*map(_message, asked), *map(_message, _answered(record))],
        "ability": str(columns.get("ability", "")),
        "reward_model": {"style": "rule", "ground_truth": "" if truth is None else str(truth)},
        "extra_info": {
            **{name: getattr(record, name) for name in COPIED},
            OLDEST: record.first,
            NEWEST: record.last,
            "prompt_ids": record.prompt_ids,
            "completion_ids": record.token_ids,
            "logprobs": record.token_logprobs,
            "versions": record.token_versions,
        },
    }


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answered(record: SampleRecord) -> Sequence[Mapping[str, Any]]:
    """Returns what came after the prompt: the answer, or all messages of an episode."""
    return record.turns or [{"role": "assistant", "content": record.text}]


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    content = message["content"]
    return {"role": message["role"], "content": content if isinstance(content, str) else json.dumps(content)}


def _arrays(arrow: Any, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Returns all columns, and the names of those whose values have no common type, which become JSON."""
    types = {"completion_ids": arrow.list_(arrow.int32()), "prompt_ids": arrow.list_(arrow.int32())}
    types |= {"logprobs": arrow.list_(arrow.float32()), "versions": arrow.list_(arrow.int32())}
    types |= {"reward": arrow.float64(), "advantage": arrow.float64()}
    columns = {}
    as_json = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = arrow.array(values, types.get(name))
        except arrow.ArrowException:
            columns[name] = arrow.array([json.dumps(value, default=str) for value in values])
            as_json.append(name)
    return columns, as_json


@dataclass(frozen=True, slots=True, eq=False)
class StoredSample:
    """A sample of a file. prompt, tokens: int32 ids; logprobs: float32, of the policy that sampled the tokens."""

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class StoredSamples:
    """The groups of a file, by the token ids of their prompt."""

    path: Path
    groups: Mapping[bytes, Sequence[Sequence[StoredSample]]]

    def check(self, prompt: NDArray[np.int32]) -> None:
        """Raises TaskError when there is no group with this prompt."""
        if prompt.astype(np.int32).tobytes() not in self.groups:
            raise TaskError(
                f"generation.stored_samples: {self.path} has no samples of this prompt; take the prompts from the same "
                "file (task.prompts)"
            )

    def sample(self, prompt: NDArray[np.int32], group: int, member: int) -> StoredSample:
        """Returns a member of the group that a draw gets: of several groups with this prompt, a number that depends on
        `group` alone chooses one."""
        found = self.groups[prompt.astype(np.int32).tobytes()]
        return found[zlib.crc32(str(group).encode()) % len(found)][member]

    def some(self, count: int) -> list[StoredSample]:
        """Returns samples of up to so many prompts."""
        return [groups[0][0] for groups in islice(self.groups.values(), count)]


def read_stored_samples(path: Path, members: int) -> StoredSamples:
    """Reads the samples of a file. members: samples that each group must have. Raises TaskError for a file that lacks a
    column, has episodes, or has a group with fewer samples."""
    arrow = optional_module("pyarrow", "parquet", "")
    parquet = optional_module("pyarrow.parquet", "parquet", "")
    key = "generation.stored_samples"
    if not path.is_file():
        raise TaskError(f"{key}: there is no file {path}")
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise TaskError(f"{key}: {path} is no Parquet file that can be read: {error}") from error
    if missing := [name for name in NEEDED if name not in table.column_names]:
        advice = "write it with `asyncrl samples RUN_DIR --parquet FILE`, without --verl"
        raise TaskError(f"{key}: {path} has no column {missing[0]}; {advice}")
    if "turns" in table.column_names and any(table.column("turns").to_pylist()):
        raise TaskError(f"{key}: {path} has episodes of several turns, which cannot be trained again")
    groups: dict[tuple[Any, int], dict[int, StoredSample]] = defaultdict(dict)
    for row in table.select([*NEEDED, *({"run"} & {*table.column_names})]).to_pylist():
        groups[row.get("run"), row["group"]][row["member"]] = _stored(row, path)
    small = [group for group in groups.values() if not {*range(members)} <= {*group}]
    if small:
        raise TaskError(
            f"{key}: {len(small)} of {len(groups)} groups of {path} have fewer than task.samples_per_prompt = "
            f"{members} samples, one has {min(map(len, small))}: write a smaller number, or record whole groups "
            '(telemetry.samples_per_step = "all")'
        )
    by_prompt: dict[bytes, list[list[StoredSample]]] = defaultdict(list)
    for group in groups.values():
        by_prompt[group[0].prompt.tobytes()].append([group[member] for member in sorted(group)])
    if not by_prompt:
        raise TaskError(f"{key}: {path} has no samples")
    return StoredSamples(path, by_prompt)


def _stored(row: Mapping[str, Any], path: Path) -> StoredSample:
    prompt, tokens = (np.array(row[name] or (), np.int32) for name in ("prompt_ids", "completion_ids"))
    logprobs = np.array(row["logprobs"] or (), np.float32)
    if not len(prompt) or not len(tokens) or len(tokens) != len(logprobs):
        raise TaskError(
            f"generation.stored_samples: {path}: sample {row['group']}.{row['member']} has {len(prompt)} tokens of its "
            f"prompt, {len(tokens)} of its completion and {len(logprobs)} log-probs; it needs one for each token"
        )
    text = row["completion"] if isinstance(row["completion"], str) else row["completion"][-1]["content"]
    return StoredSample(prompt, tokens, logprobs, row["finish"], text)
