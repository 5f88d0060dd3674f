"""Samples of a run in a Parquet file: what it has for asyncrl, TRL and verl, and what cannot be trained from it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from asyncrl.config.schema import TaskConfig
from asyncrl.errors import TaskError
from asyncrl.protocols.batch import RowRef
from asyncrl.protocols.messages import SampleText, TrainedSample
from asyncrl.protocols.prompt_row import PromptRow
from asyncrl.tasks.prompt_rows import Row
from asyncrl.tasks.prompt_sources import pretraining_rows
from asyncrl.tasks.stored_samples import read_stored_samples, write_samples
from asyncrl.telemetry.samples_file import SampleRecord, sample_record
from tests import golden

SYSTEM = {"role": "system", "content": "Be brief."}


def record(group: int, member: int, prompt: str = "1+1?", ids: tuple[int, ...] = (4, 5)) -> SampleRecord:
    ref = RowRef(group, member, 0, 0, len(ids), 2, 6, 7, "stop", (), 0.5, -0.25)
    tokens = {"token_ids": (7, 8 + member), "token_logprobs": (-0.5, -1.25), "token_versions": (6, 7)}
    text = SampleText(group, member, prompt, f"is {member}", prompt_ids=ids, **tokens)
    return sample_record(3, ref, text, {"numeric": 0.5}, TrainedSample(group, member, 0, 2, 0))


def row(prompt: Any, **columns: Any) -> Row:
    return Row(prompt, PromptRow({"prompt": prompt, **columns}))


RECORDS = [record(group, member) for group in (0, 1) for member in (0, 1)]


def table(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return found


def test_a_sample_has_the_names_of_trl_its_tokens_and_the_columns_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    assert write_samples(path, "run-a", RECORDS, lambda group: row("1+1?", answer="2", reward="prize")) == []
    first = table(path)[0]
    assert (first["prompt"], first["completion"], first["answer"]) == ("1+1?", "is 0", "2")
    assert (first["prompt_ids"], first["completion_ids"], first["versions"]) == ([4, 5], [7, 8], [6, 7])
    assert first["logprobs"] == [-0.5, -1.25]
    assert (first["reward"], first["row_reward"], first["advantage"]) == (0.5, "prize", -0.25)
    assert (first["run"], first["step"], first["group"], first["member"]) == ("run-a", 3, 0, 0)
    assert json.loads(first["terms"]) == {"numeric": 0.5}
    assert list(tmp_path.iterdir()) == [path]


def test_chat_messages_stay_messages(tmp_path: Path) -> None:
    asked = [SYSTEM, {"role": "user", "content": "1+1?"}]
    write_samples(tmp_path / "own", "a", RECORDS, lambda group: row(asked))
    assert table(tmp_path / "own")[1]["prompt"] == asked
    assert table(tmp_path / "own")[1]["completion"] == [{"role": "assistant", "content": "is 1"}]
    write_samples(tmp_path / "verl", "a", RECORDS, lambda group: row(asked, answer=2, data_source="sums"), "verl")
    first = table(tmp_path / "verl")[0]
    assert first["messages"] == [*asked, {"role": "assistant", "content": "is 0"}]
    assert (first["data_source"], first["prompt"]) == ("sums", asked)
    assert first["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert (first["extra_info"]["reward"], first["extra_info"]["completion_ids"]) == (0.5, [7, 8])


@pytest.mark.parametrize("of_row", [None, row("another question")])
def test_a_prompt_that_cannot_be_read_any_more_is_its_text(tmp_path: Path, of_row: Row | None) -> None:
    write_samples(tmp_path / "own", "a", RECORDS, lambda group: of_row)
    assert table(tmp_path / "own")[0]["prompt"] == "1+1?"
    write_samples(tmp_path / "verl", "a", RECORDS, lambda group: of_row, "verl")
    assert table(tmp_path / "verl")[0]["prompt"] == [{"role": "user", "content": "1+1?"}]


def test_a_column_of_several_types_becomes_json(tmp_path: Path) -> None:
    rows = {0: row("1+1?", answer=2), 1: row("1+1?", answer="two")}
    assert write_samples(tmp_path / "own", "a", RECORDS, rows.get) == ["answer"]
    assert [json.loads(each["answer"]) for each in table(tmp_path / "own")] == [2, 2, "two", "two"]


def test_texts_to_learn_are_read_from_both(tmp_path: Path) -> None:
    """A file for TRL or verl, with the ground truth in a column `answer`, teaches what was sampled."""
    for asked in ("1+1?", [SYSTEM, {"role": "user", "content": "1+1?"}]):
        for names in ("asyncrl", "verl"):
            path = tmp_path / "texts.parquet"
            write_samples(path, "a", RECORDS, lambda group, asked=asked: row(asked, answer="2"), names)
            found = pretraining_rows(TaskConfig(prompts="none", pretrain=str(path)))
            as_messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            assert found[1] == {"prompt": as_messages if names == "verl" else asked, "answer": "is 1"}


TURNS = [
    {"role": "assistant", "content": "3?"},
    {"role": "user", "content": "less"},
    {"role": "assistant", "content": "2"},
]


def test_episodes_keep_their_turns(tmp_path: Path) -> None:
    episode = [replace(RECORDS[0], turns=TURNS, text="2")]
    asked = {"role": "user", "content": "1+1?"}
    for names in ("asyncrl", "verl"):
        path = tmp_path / "samples.parquet"
        write_samples(path, "a", episode, lambda group: None, names)
        first = table(path)[0]
        assert [*first["prompt"], *first["completion"]] if names == "asyncrl" else first["messages"] == [asked, *TURNS]
        (found,) = pretraining_rows(TaskConfig(prompts="none", pretrain=str(path)))
        assert found == {"prompt": [asked, *TURNS[:2]], "answer": "2"}


def test_rows_that_are_samples_already_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    old = row("1+1?", answer="2", completion="is 5", completion_ids=[1], prompt_ids=[2], reward=0.0)
    write_samples(path, "a", RECORDS, lambda group: old)
    first = table(path)[0]
    assert (first["completion"], first["answer"]) == ("is 0", "2")
    assert not [name for name in first if name.startswith("row_")]


def test_a_draw_gets_the_members_of_one_group_with_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    other = [record(9, member, "2+2?", (6,)) for member in (0, 1)]
    write_samples(path, "a", [*RECORDS, *other], lambda group: None)
    stored = read_stored_samples(path, 2)
    found = stored.sample(np.array([4, 5], np.int32), 17, 1)
    assert (found.tokens.tolist(), found.logprobs.tolist(), found.text) == ([7, 9], [-0.5, -1.25], "is 1")
    assert found.tokens.dtype == np.int32
    assert found.logprobs.dtype == np.float32
    assert stored.sample(np.array([6], np.int32), 17, 0).prompt.tolist() == [6]
    groups = stored.groups[np.array([4, 5], np.int32).tobytes()]
    assert len(groups) == 2
    for draw in range(8):
        members = [stored.sample(np.array([4, 5], np.int32), draw, member) for member in (0, 1)]
        assert any(members == list(group) for group in groups)
    chosen = {id(stored.sample(np.array([4, 5], np.int32), draw, 0)) for draw in range(8)}
    assert len(chosen) == 2
    stored.check(np.array([4, 5], np.int64))
    with golden.raises(TaskError):
        stored.check(np.array([4], np.int32))


@pytest.mark.parametrize(
    ("records", "members", "message"),
    [
        (RECORDS, 3, "2.*2 groups"),
        ([replace(RECORDS[0], token_ids=[], token_logprobs=[], token_versions=[])], 1, "0.*0"),
        ([replace(RECORDS[0], turns=[{"role": "assistant", "content": "5"}])], 1, ""),
        ([replace(RECORDS[0], token_logprobs=[-1.0])], 1, "1"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, records: list[SampleRecord], members: int, message: str
) -> None:
    write_samples(tmp_path / "samples.parquet", "a", records, lambda group: None)
    with golden.raises(TaskError, match=message):
        read_stored_samples(tmp_path / "samples.parquet", members)


def test_other_files_are_refused(tmp_path: Path) -> None:
    write_samples(tmp_path / "verl.parquet", "a", RECORDS, lambda group: None, "verl")
    with golden.raises(TaskError, match="column prompt_ids"):
        read_stored_samples(tmp_path / "verl.parquet", 2)
    (tmp_path / "text").write_text("no Parquet")
    with pytest.raises(TaskError, match="is no Parquet file that can be read"):
        read_stored_samples(tmp_path / "text", 2)
    with golden.raises(TaskError):
        read_stored_samples(tmp_path / "nowhere", 2)
