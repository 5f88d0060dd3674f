"""What the model wrote, kept and found again."""

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.protocols.batch import RowRef
from asyncrl.protocols.messages import SampleText, TrainedSample
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.samples_file import (
    REMEMBERED_GROUPS,
    RecordedGroups,
    SampleRecord,
    SamplesFile,
    read_samples,
    sample_record,
    select_samples,
    shown_by_token,
    to_show,
)

ROW = RowRef(3, 1, 0, 0, 5, 12, 6, 7, "stop", (), 0.5, -0.25)
RECORD = sample_record(8, ROW, SampleText(3, 1, "1+1?", "two"), {"numeric": 0.5}, TrainedSample(3, 1, 0, 8, 4, "stale"))


def write(path: Path, records: Iterable[SampleRecord]) -> None:
    with closing(LineFile(path)) as file:
        for record in records:
            file.append(record.fields())


def some() -> list[SampleRecord]:
    rewards = [(1, 0, 0.5), (1, 1, None), (2, 2, 1.0), (2, 3, 0.0), (2, 4, 0.25)]
    return [replace(RECORD, step=step, group=group, reward=reward, masked=group % 2) for step, group, reward in rewards]


def test_a_record_joins_what_engine_reward_and_trainer_say() -> None:
    assert (RECORD.step, RECORD.group, RECORD.member, RECORD.prompt, RECORD.text) == (8, 3, 1, "1+1?", "two")
    assert (RECORD.first, RECORD.last, RECORD.trained, RECORD.masked, RECORD.reason) == (6, 7, 8, 4, "stale")
    assert (RECORD.reward, RECORD.terms, RECORD.advantage, RECORD.finish) == (0.5, {"numeric": 0.5}, -0.25, "stop")


def test_records_of_different_samples_are_not_joined() -> None:
    with pytest.raises(AssertionError):
        sample_record(8, ROW, SampleText(3, 2, "", ""), {}, TrainedSample(3, 1, 0, 8, 4))


SAID = [{"role": "assistant", "content": "5"}, {"role": "user", "content": "more"}]
TOKENS = {"prompt_ids": [4, 5], "token_ids": [7, 9], "token_logprobs": [-0.5, -1.0], "token_versions": [6, 7]}
BY_TOKEN = {"token_advantages": [0.5, -0.5], "token_rewards": [0.0, 1.0]}


@pytest.mark.parametrize(
    ("said", "trained", "more"),
    [
        (SampleText(3, 1, "1+1?", "two"), {}, {}),
        (SampleText(3, 1, "Guess", "7", SAID, (0.5,)), {}, {"turns": SAID, "turn_rewards": [0.5]}),
        (SampleText(3, 1, "1+1?", "two", [], (), "", (4, 5), (7, 9), (-0.5, -1.0), (6, 7)), {}, TOKENS),
        (SampleText(3, 1, "1+1?", "two"), {"advantages": (0.5, -0.5), "rewards": (0.0, 1.0)}, BY_TOKEN),
    ],
    ids=["plain", "episode", "tokens", "numbers of tokens"],
)
def test_the_file_has_turns_and_tokens_where_there_are_some(
    said: SampleText, trained: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    record = sample_record(8, ROW, said, {}, TrainedSample(3, 1, 0, 8, 4, **trained))
    path = tmp_path / "samples.jsonl"
    write(path, [RECORD, record])
    plain, written = (json.loads(line) for line in path.read_text().splitlines())
    assert {name: written[name] for name in written.keys() - plain.keys()} == more
    assert read_samples(path) == [RECORD, record]


def test_steps_done_again_after_a_resume_count_once(tmp_path: Path) -> None:
    history = [(1, 0), (1, 0), (2, 0), (3, 0), (2, 1), (2, 1)]
    write(
        tmp_path / "samples.jsonl",
        [replace(RECORD, step=step, incarnation=incarnation) for step, incarnation in history],
    )
    kept = [(record.step, record.incarnation) for record in read_samples(tmp_path / "samples.jsonl")]
    assert kept == [(1, 0), (1, 0), (2, 1), (2, 1)]


@pytest.mark.parametrize("of_another_type", [[], {}, None, "2", 1.5])
@pytest.mark.parametrize("name", ["step", "incarnation"])
def test_a_line_whose_place_in_history_is_no_number_is_left_out(
    tmp_path: Path, name: str, of_another_type: Any
) -> None:
    write(tmp_path / "samples.jsonl", [RECORD, replace(RECORD, **{name: of_another_type}), replace(RECORD, step=9)])
    assert [record.step for record in read_samples(tmp_path / "samples.jsonl")] == [RECORD.step, 9]


def test_a_try_that_trained_nothing_gives_way_to_the_next_one(tmp_path: Path) -> None:
    history = [(1, ""), (2, "not finite"), (2, "not finite"), (2, ""), (2, ""), (3, "stale")]
    write(tmp_path / "samples.jsonl", [replace(RECORD, step=step, skipped=skipped) for step, skipped in history])
    kept = [(record.step, record.skipped) for record in read_samples(tmp_path / "samples.jsonl")]
    assert kept == [(1, ""), (2, ""), (2, ""), (3, "stale")]


def rows(*groups: tuple[int, int]) -> list[RowRef]:
    """Rows of groups, each with an id and a number of members."""
    return [ROW._replace(group=group, member=member) for group, members in groups for member in range(members)]


def test_whole_groups_are_shown_that_are_spread_over_the_batch() -> None:
    batch = rows(*((group, 4) for group in range(16)))
    shown = [(row.group, row.member) for row in to_show(batch, 8)]
    assert shown == [(0, 0), (0, 1), (0, 2), (0, 3), (8, 0), (8, 1), (8, 2), (8, 3)]
    assert [row.group for row in to_show(batch, 11)] == [row.group for row in to_show(batch, 8)]
    assert [(row.group, row.member) for row in to_show(batch, 2)] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert [row.group for row in to_show(rows(*((group, 1) for group in range(64))), 8)] == list(range(0, 64, 8))
    assert len(to_show(rows((0, 1), (1, 4), (2, 2)), 4)) == 1, "how many fit follows from the largest group"
    assert to_show(batch, "all") == batch
    assert to_show(batch[:3], 8) == batch[:3]
    assert to_show(batch, 0) == []


@pytest.mark.parametrize(
    ("selection", "groups"),
    [
        ({}, [2, 3, 4]),
        ({"step": 1}, [0, 1]),
        ({"group": 1}, [1]),
        ({"order": "best"}, [2, 0, 4, 3]),
        ({"order": "worst"}, [3, 4, 0, 2]),
        ({"order": "best", "step": 2, "count": 2}, [2, 4]),
        ({"masked": True}, [1, 3]),
        ({"step": 9}, []),
    ],
)
def test_selections(selection: dict[str, Any], groups: list[int]) -> None:
    assert [record.group for record in select_samples(some(), **selection)] == groups
    assert select_samples([], **selection) == []


def test_damaged_lines_are_told_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, some()[:2])
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, b"{damaged", b"[1]", b'{"step": 1}', b"\xff", second, b""]))
    assert read_samples(path) == some()[:2]
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" is damaged")[0] for line in told] == [f"asyncrl: {path}, line {n}" for n in (2, 3, 4, 5)]


def test_numbers_of_tokens_are_asked_for_up_to_a_sum_of_tokens() -> None:
    rows = [ROW._replace(member=member, tokens=10_000) for member in range(5)]
    assert shown_by_token(rows) == ((3, 0), (3, 1), (3, 2))
    assert shown_by_token([]) == ()


def test_a_file_that_is_full_keeps_steps_that_are_spread_over_the_run(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    line = len(json.dumps(RECORD.fields()))
    with closing(SamplesFile(path, most=20 * line)) as file:
        for step in range(1, 101):
            file.append([replace(RECORD, step=step, member=member) for member in range(2)])
            if file.is_full:
                file.thin_out()
    steps = [record.step for record in read_samples(path)]
    assert path.stat().st_size <= 21 * line
    assert sorted(set(steps)) == list(range(16, 97, 16))
    assert all(steps.count(step) == 2 for step in steps), "groups stay whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_group_that_is_trained_in_parts_is_recorded_whole_or_not_at_all() -> None:
    chosen = RecordedGroups(4)

    def members(*parts: tuple[int, range]) -> list[tuple[int, int]]:
        batch = [ROW._replace(group=group, member=member) for group, part in parts for member in part]
        return [(row.group, row.member) for row in chosen.choose(batch)]

    assert members((0, range(3)), (1, range(4))) == [(0, 0), (0, 1), (0, 2)]
    assert members((0, range(3, 4)), (1, range(4, 8)), (2, range(4))) == [(0, 3), *((2, number) for number in range(4))]
    assert members((1, range(8, 9))) == [(1, 8)], "a step is not left without any sample"
    assert RecordedGroups(0).choose(rows((0, 4))) == []
    assert len(RecordedGroups("all").choose(rows((0, 4), (1, 4)))) == 8


def test_what_is_remembered_of_groups_is_bounded() -> None:
    chosen = RecordedGroups(1)
    for group in range(REMEMBERED_GROUPS + 10):
        chosen.choose(rows((group, 1)))
    assert len(chosen._known) == REMEMBERED_GROUPS
