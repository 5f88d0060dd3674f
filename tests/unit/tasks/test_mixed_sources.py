"""Several sources with weights, columns under other names, and data sets of the hub."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.named_files import source_files
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.config.toml_writer import dump
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks import Draw, held_out_prompts, load_prompts, training_prompts
from asyncrl.tasks.prompt_rows import drawn_part
from asyncrl.tasks.source_problems import prompt_problems
from tests import golden


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, **sections})


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    easy = write(tmp_path / "easy.jsonl", *({"prompt": f"e{number}"} for number in range(3)))
    hard = write(tmp_path / "hard.jsonl", *({"question": f"h{number}"} for number in range(5)))
    return easy, hard


def mixed(two: tuple[str, str], *weights: float) -> Config:
    easy, hard = two
    sources: list[Any] = [{"use": easy}, {"use": hard, "columns": {"prompt": "question"}}]
    for source, weight in zip(sources, weights, strict=False):
        source["weight"] = weight
    return config(task={"prompts": sources})


def test_without_weights_each_row_is_drawn_once_an_epoch(two: tuple[str, str]) -> None:
    draw = Draw(training_prompts(mixed(two)), seed=3)
    assert sorted(draw(group).prompt for group in range(8)) == ["e0", "e1", "e2", *(f"h{n}" for n in range(5))]


def test_with_weights_batches_have_the_shares_and_sources_epochs_of_their_own(two: tuple[str, str]) -> None:
    draw = Draw(training_prompts(mixed(two, 3.0, 1.0)), seed=3)
    drawn = [str(draw(group).prompt) for group in range(60)]
    for first in range(0, 60, 4):
        assert Counter(prompt[0] for prompt in drawn[first : first + 4]) == {"e": 3, "h": 1}
    easy = [prompt for prompt in drawn if prompt[0] == "e"]
    assert all(sorted(easy[first : first + 3]) == ["e0", "e1", "e2"] for first in range(0, 45, 3))
    assert len({tuple(easy[first : first + 3]) for first in range(0, 45, 3)}) > 1


@pytest.mark.parametrize("weights", [(1.0, 2.0, 4.0), (0.1, 0.2, 0.7), (5.0,), (1.0, 1.0)])
def test_each_source_has_its_share_and_counts_its_groups_without_a_gap(weights: tuple[float, ...]) -> None:
    counts = [0] * len(weights)
    for group in range(500):
        part, before = drawn_part(weights, group)
        assert before == counts[part]
        counts[part] += 1
        for each, weight in zip(counts, weights, strict=True):
            assert abs(each - (group + 1) * weight / sum(weights)) < len(weights)


def test_a_row_of_a_mixture_is_named_by_its_source(two: tuple[str, str], tmp_path: Path) -> None:
    prompts = training_prompts(mixed(two))
    assert prompts.where(2) == f"{two[0]}, line 3"
    assert prompts.where(3) == f"{two[1]}, line 1"
    assert Draw(prompts, 0, shuffle=False).where(11) == f"{two[1]}, line 1"
    write(tmp_path / "hard.jsonl", {"question": "h"}, {"question": 3})
    with golden.raises(TaskError, match=r"hard\.jsonl, line 2"):
        training_prompts(mixed(two))


def test_columns_are_found_under_other_names_and_inside_others(tmp_path: Path) -> None:
    row = {"question": "How many?", "reward_model": {"ground_truth": "72"}, "a.b": "dotted"}
    source = write(tmp_path / "rows.jsonl", row)
    names = {"prompt": "question", "answer": "reward_model.ground_truth", "other": "a.b"}
    prompts = training_prompts(config(task={"prompts": source, "columns": names}))
    assert prompts.row(0).prompt == "How many?"
    assert prompts.row(0).columns == {**row, "prompt": "How many?", "answer": "72", "other": "dotted"}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": "questoin"}, r"line 1: task\.columns\.prompt.*column questoin"),
        ({"prompt": "question", "answer": "a.b"}, r"task\.columns\.answer.*column a\.b"),
        ({}, r'"question".*task\.columns = \{ prompt = "question" \}'),
    ],
)
def test_a_column_that_is_not_there_is_named(columns: dict[str, str], said: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", {"question": "q", "a": {"c": 1}})
    with golden.raises(TaskError, match=said):
        training_prompts(config(task={"prompts": source, "columns": columns}))


def test_held_out_prompts_have_the_same_columns_where_they_have_them(tmp_path: Path) -> None:
    own = write(tmp_path / "own.jsonl", {"question": "q", "prompt": "p"})
    other = write(tmp_path / "other.jsonl", {"prompt": "p"})
    for source, expected in ((own, "q"), (other, "p")):
        task = {"prompts": own, "columns": {"prompt": "question"}}
        prompts = held_out_prompts(config(task=task, evaluate={"prompts": source}))
        assert prompts is not None
        assert prompts.row(0).prompt == expected


TOML = """
[model]
name = "m"
[task]
columns = { answer = "solution" }
prompts = ["a.jsonl", { use = "sub", weight = 2.0, options = { x = 1 } }]
"""


def test_a_list_of_sources_is_written_read_and_anchored(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/train.jsonl").write_text("")
    (tmp_path / "e.toml").write_text(TOML.replace('"a.jsonl"', '{ use = "a.jsonl", weight = 1 }'))
    read = load(tmp_path / "e.toml", (), {}).config
    assert [each.use for each in read.task.sources] == [f"{tmp_path}/a.jsonl", f"{tmp_path}/sub"]
    assert [(key, path.name) for key, path in source_files(read)] == [
        ("task.prompts", "a.jsonl"),
        ("task.prompts", "train.jsonl"),
    ]
    (tmp_path / "again.toml").write_text(dump(read))
    assert load(tmp_path / "again.toml", (), {}).config == read


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ('["a.jsonl", { use = "b.jsonl", weight = 2.0 }]', "a.jsonl"),
        ('[{ use = "a.jsonl", wieght = 2.0 }]', "task.prompts: item 1"),
        ("[]", "1"),
        ("3", ""),
    ],
)
def test_mistakes_in_a_list_of_sources_say_one_thing(prompts: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(f'model.name = "m"\n[task]\nprompts = {prompts}\n')
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "e.toml", (), {})
    golden.says(str(refused.value), said)
    assert len(str(refused.value).splitlines()) == 1
    assert str(refused.value).count("must be") <= 1


def test_flags_name_one_source_or_several() -> None:
    named = ["--model.name", "m", "--task.prompts", "a.jsonl"]
    assert load(None, named, {}).config.task.prompts == str(Path("a.jsonl").absolute())
    both = load(None, [*named, "--task.prompts", "b.jsonl"], {}).config.task.sources
    assert [Path(each.use).name for each in both] == ["a.jsonl", "b.jsonl"]


def test_every_source_of_a_list_is_checked_before_a_run(two: tuple[str, str], tmp_path: Path) -> None:
    assert list(prompt_problems(mixed(two))) == []
    broken = config(task={"prompts": [two[0], str(tmp_path / "none.jsonl")]})
    assert ["there is no file" in str(problem) for problem in prompt_problems(broken)] == [True]
    code = config(task={"prompts": ["nowhere.py:f", "hub:x", two[0]]})
    assert ["there is no file" in str(problem) for problem in prompt_problems(code)] == [True]


class Streamed:
    """Stands in for a streamed data set: it has rows one after the other, and neither length nor numbers."""

    read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self.read += 1
            yield {"prompt": f"row {self.read}"}


class StreamingHub:
    DatasetsError = KeyError

    def __init__(self) -> None:
        self.stream = Streamed()
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def load_dataset(self, path: str, **arguments: Any) -> Any:
        self.asked.append((path, arguments))
        if path == "broken":
            raise KeyError("the generator failed")
        if "name" not in arguments:
            raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['main']")
        return self.stream if arguments.get("streaming") else [{"prompt": "p"}]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> StreamingHub:
    made = StreamingHub()
    monkeypatch.setitem(sys.modules, "datasets", made)  # type: ignore[arg-type]
    return made


def test_a_configuration_of_the_hub_is_named_behind_the_data_set(hub: StreamingHub) -> None:
    assert load_prompts("hub:openai/gsm8k:main#test", {"size": 3}).row(0).prompt == "p"
    assert hub.asked == [("openai/gsm8k", {"split": "test", "name": "main"})]
    with pytest.raises(TaskError, match=r"available configs: \['main'\]; write hub:openai/gsm8k:CONFIG#test$"):
        load_prompts("hub:openai/gsm8k#test", {"size": 3})
    with golden.raises(TaskError, match=r"task\.options\.name"):
        load_prompts("hub:openai/gsm8k:main", {"size": 3, "name": "socratic"})
    with golden.raises(TaskError, match="hub:broken"):
        load_prompts("hub:broken", {"size": 3})


def test_of_a_streamed_data_set_the_first_rows_are_read_and_that_is_said(hub: StreamingHub) -> None:
    streamed = config(task={"prompts": "hub:big:en", "size": 7, "options": {"streaming": True}})
    prompts = training_prompts(streamed)
    assert (len(prompts), prompts.row(6).prompt, hub.stream.read) == (7, "row 7", 7)
    assert prompts.notes == ("hub:big:en is streamed: its first 7 rows are the data set; task.size says how many",)
