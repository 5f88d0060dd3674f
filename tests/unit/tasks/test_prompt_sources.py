import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import reasoning_gym

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks import held_out_prompts, load_prompts, training_prompts
from tests import golden

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}


def test_parquet_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match=r"-m pip install .*\[parquet\]'$"):
        load_prompts(str(file))


SOURCE = """
import itertools

def rows(size, seed=0, word="x"):
    return [{"prompt": f"{word}{seed}-{number}"} for number in range(size)]

def endless():
    return ({"prompt": str(number)} for number in itertools.count())

def all_of_them():
    return [{"prompt": str(number)} for number in range(9)]

value = 3

def fails():
    raise KeyError("no such thing")

def fails_later():
    yield {"prompt": "a"}
    raise ZeroDivisionError("later")

def nothing(): ...
def number(): return 3
def text(): return "a prompt"
def table(): return {"prompt": ["a"]}
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    return str(file)


def test_a_function_gets_the_options_it_takes(source: str) -> None:
    prompts = load_prompts(f"{source}:rows", {"size": 4, "seed": 7, "word": "w"})
    assert len(prompts) == 4
    assert prompts.row(3).prompt == "w7-3"


def test_an_iterator_is_cut_at_size_and_a_list_is_not(source: str) -> None:
    assert len(load_prompts(f"{source}:endless", {"size": 5, "seed": 0})) == 5
    assert len(load_prompts(f"{source}:all_of_them", {"size": 5, "seed": 0})) == 9


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        *((name, {}) for name in ("gsm8k", "hub:#train", "FOLDER/sources.jsonl", "FOLDER/questions.parquet")),
        *((f"FOLDER/source.py:{name}", {}) for name in ("row", "value", "fails", "fails_later", "nothing", "number")),
        *((f"FOLDER/source.py:{name}", {}) for name in ("text", "table")),
        ("FOLDER/source.py:rows", {"size": 1, "wrd": "x"}),
        ("FOLDER/broken.py:rows", {}),
        *((given, {}) for given in (5, {"prompt": "a"}, iter(["a"]))),
    ],
    ids=lambda given: str(given)[:24],
)
def test_what_gives_no_rows_is_refused_with_what_to_write(
    source: str, tmp_path: Path, spec: Any, options: Mapping[str, Any]
) -> None:
    for name in ("hard.csv", "source.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    with golden.raises((TaskError, ConfigError)):
        load_prompts(spec.replace("FOLDER", str(tmp_path)) if isinstance(spec, str) else spec, options)


def test_hub_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with golden.raises(TaskError, match=r"-m.*\[hub\]"):
        load_prompts("hub:openai/gsm8k")


def test_reasoning_gym() -> None:
    prompts = load_prompts("reasoning_gym:chain_sum", {"size": 3, "seed": 5, "max_terms": 2})
    assert len(prompts) == 3
    row = prompts.row(2).columns
    origin = row["reasoning_gym"]
    entry = reasoning_gym.create_dataset(origin["name"], **origin["options"])[origin["index"]]
    assert (entry["question"], entry["answer"]) == (row["prompt"], row["answer"])
    assert row["answer"].lstrip("-").isdigit()


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("reasoning_gym:chain_summ", {"size": 3}, "no data set chain_summ; did you mean chain_sum"),
        ("reasoning_gym:chain_sum", {"size": 3, "terms": 1}, "does not take .*terms"),
        ("reasoning_gym:chain_sum", {"size": 3, "max_terms": 0}, "max_terms must be"),
    ],
)
def test_mistakes_about_reasoning_gym(spec: str, options: Mapping[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        load_prompts(spec, options)


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, **sections})


def test_held_out_questions_are_never_trained_on() -> None:
    tiny = {"prompts": "reasoning_gym:products", "options": {"max_digits": 1}, "size": 100}
    gym = config(task=tiny, evaluate=tiny)
    training = training_prompts(gym)
    held_out = held_out_prompts(gym)
    assert held_out is not None
    assert len(training) == len(held_out) == 100
    seen = {str(training.row(number).prompt) for number in range(100)}
    assert len(seen) > 50
    assert seen.isdisjoint({str(held_out.row(number).prompt) for number in range(100)})


def test_no_held_out_prompts() -> None:
    assert held_out_prompts(config(task={"prompts": "x.jsonl"})) is None


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    for name, text in (("rows.jsonl", '{"prompt": "é\u2028"}\r\n'), ("rows.csv", "prompt\né\u2028\n")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig", newline="")
        assert [prompt for prompt, _ in load_prompts(str(tmp_path / name)).first(2)] == ["é\u2028"]


def test_a_parquet_file_that_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL_ROW]), file)
    for content in (file.read_bytes()[:-20], b"", b"PAR1 and more PAR1"):
        file.write_bytes(content)
        with pytest.raises(TaskError, match=r"train\.parquet is no Parquet file that can be read: "):
            load_prompts(str(file))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "rows.csv").write_text("prompt\na\n")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TaskError, match=r"rows\.csv cannot be read: Permission denied"):
        load_prompts(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize("source", ["missing.jsonl", "nothing", "hub:", "no_such_module:f", "bad.jsonl", "empty.jsonl"])
def test_a_mistake_in_held_out_prompts_names_their_key(source: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "empty.jsonl").write_text("")
    prompts = str(tmp_path / source) if source.endswith(".jsonl") else source
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "evaluate": {"prompts": prompts}})
    with pytest.raises(TaskError, match=r"^evaluate\.prompts: ") as mistake:
        held_out_prompts(config)
    assert "task.prompts" not in str(mistake.value)


@pytest.mark.parametrize("written", [json.dumps, repr])
def test_a_nested_column_may_be_in_a_table_that_is_text(written: Callable[[Any], str]) -> None:
    rows = [{"prompt": "a", "reward_model": written({"style": "rule", "ground_truth": "72"})}]
    assert load_prompts(rows, columns={"answer": "reward_model.ground_truth"}).row(0).columns["answer"] == "72"
    with golden.raises(TaskError, match=r"column reward_model\.truth"):
        load_prompts(rows, columns={"answer": "reward_model.truth"})
