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


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "b", "answer": 2}\n')
    prompts = load_prompts(str(file))
    assert len(prompts) == 2
    assert prompts.row(1).columns == {"prompt": "b", "answer": 2}


@pytest.mark.parametrize(("text", "said"), [("{prompt: 1}", "line 1: not JSON"), ('"a"', "line 1: a row is an object")])
def test_jsonl_errors_name_the_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(TaskError, match=said):
        load_prompts(str(file))


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('prompt,answer\n"2, 3?",5\n')
    assert load_prompts(str(file)).row(0).columns == {"prompt": "2, 3?", "answer": "5"}
    file.write_text("prompt,answer\na,b,c\n")
    with golden.raises(TaskError, match="line 2.*3 fields"):
        load_prompts(str(file))


def test_parquet_with_the_columns_of_verl(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL_ROW, VERL_ROW]), file)
    prompts = load_prompts(str(file))
    assert len(prompts) == 2
    assert prompts.row(1).prompt == VERL_ROW["prompt"]
    assert prompts.row(1).columns == VERL_ROW


def test_parquet_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match=r"-m pip install .*\[parquet\]'$"):
        load_prompts(str(file))


def test_a_missing_file_names_the_closest(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with golden.raises(TaskError, match="mean rows"):
        load_prompts(str(tmp_path / "row.jsonl"))


def test_where_none_is_close_a_missing_file_names_those_that_can_be_read(tmp_path: Path) -> None:
    for name in ["hard.csv", "easy.jsonl", "notes.txt"]:
        (tmp_path / name).write_text("")
    with golden.raises(TaskError):
        load_prompts(str(tmp_path / "questions.parquet"))


def test_what_is_no_source_says_what_is() -> None:
    with golden.raises(TaskError, match="hub:NAME"):
        load_prompts("gsm8k")


SOURCE = """
import itertools

def rows(size, seed=0, word="x"):
    return [{"prompt": f"{word}{seed}-{number}"} for number in range(size)]

def endless():
    return ({"prompt": str(number)} for number in itertools.count())

def all_of_them():
    return [{"prompt": str(number)} for number in range(9)]

value = 3
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
    ("name", "options", "said"),
    [
        ("row", {}, "mean rows"),
        ("rows", {"size": 1, "wrd": "x"}, "mean word"),
        ("value", {}, ""),
    ],
)
def test_mistakes_about_functions(source: str, name: str, options: Mapping[str, Any], said: str) -> None:
    with golden.raises((TaskError, ConfigError), match=said):
        load_prompts(f"{source}:{name}", options)


def test_rows_given_in_python() -> None:
    assert load_prompts([{"prompt": "hi", "answer": 3}]).row(0).columns["answer"] == 3


class FakeDataset:
    """What of datasets.Dataset is used: length and rows by number, made on demand."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.read.append(number)
        return {"prompt": f"row {number}"}


def test_a_dataset_is_read_on_demand() -> None:
    dataset = FakeDataset()
    prompts = load_prompts(dataset)  # type: ignore[arg-type]
    assert prompts.row(999_999).prompt == "row 999999"
    assert dataset.read == [0, 999_999]


class FakeHub:
    """`datasets.load_dataset` that remembers what it was asked for."""

    asked: tuple[str, dict[str, Any]]

    def load_dataset(self, path: str, **arguments: Any) -> list[dict[str, Any]]:
        self.asked = (path, arguments)
        if path == "missing":
            raise FileNotFoundError("no such data set")
        return [{"prompt": "from the hub"}]


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    prompts = load_prompts("hub:openai/gsm8k#test", {"size": 5, "seed": 0, "name": "main"})
    assert hub.asked == ("openai/gsm8k", {"split": "test", "name": "main"})
    assert prompts.row(0).prompt == "from the hub"
    with golden.raises(TaskError, match="hub:missing"):
        load_prompts("hub:missing")


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


def test_training_and_held_out_prompts_differ_by_seed() -> None:
    gym = config(
        task={"prompts": "reasoning_gym:chain_sum", "size": 20, "system": "Answer with a number."},
        evaluate={"prompts": "reasoning_gym:chain_sum", "size": 5},
    )
    training = training_prompts(gym)
    held_out = held_out_prompts(gym)
    assert held_out is not None
    assert (len(training), len(held_out)) == (20, 5)
    assert held_out.row(0).prompt != training.row(0).prompt
    assert held_out.row(0).prompt[0] == {"role": "system", "content": "Answer with a number."}


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


def test_rows_given_replace_the_spec() -> None:
    assert training_prompts(config(task={"prompts": "none.jsonl"}), [{"prompt": "hi"}]).row(0).prompt == "hi"


def test_every_line_of_a_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ({"prompt": "a"}, {"promt": "b"})))
    with golden.raises(TaskError, match="line 2"):
        load_prompts(str(file))


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    for name, text in (("rows.jsonl", '{"prompt": "é\u2028"}\r\n'), ("rows.csv", "prompt\né\u2028\n")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig", newline="")
        assert [prompt for prompt, _ in load_prompts(str(tmp_path / name)).first(2)] == ["é\u2028"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_file_that_is_no_utf8_names_the_line(tmp_path: Path, name: str) -> None:
    lines = {"rows.jsonl": '{"prompt": "a"}\n{"prompt": "é"}\n', "rows.csv": "prompt\né\n"}
    (tmp_path / name).write_bytes(lines[name].encode("latin-1"))
    with golden.raises(TaskError, match="line 2.*UTF-8"):
        load_prompts(str(tmp_path / name))


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


STRANGE = """
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", r"fails raised KeyError: 'no such thing' \(.*strange\.py, line 3\)$"),
        ("fails_later", r"raised ZeroDivisionError: later \(.*strange\.py, line 7\)$"),
        ("nothing", "returned None; a function of prompts returns a list of rows, or yields them$"),
        ("number", "returned 3; "),
        ("text", "returned 'a prompt'; "),
        ("table", "returned {'prompt': .*; "),
    ],
)
def test_functions_that_make_no_rows(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "strange.py").write_text(STRANGE)
    with pytest.raises(TaskError, match=f"^task.prompts: .*{said}"):
        load_prompts(f"{tmp_path}/strange.py:{name}")


def test_a_file_of_prompts_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "broken_prompts.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(TaskError, match=r"raised ModuleNotFoundError: .* \(.*broken_prompts\.py, line 1\)$"):
        load_prompts(f"{tmp_path}/broken_prompts.py:rows")


def test_the_hub_needs_a_name() -> None:
    with pytest.raises(TaskError, match="write hub:NAME"):
        load_prompts("hub:#train")


@pytest.mark.parametrize("rows", [5, {"prompt": "a"}, iter(["a"])])
def test_what_python_hands_over_has_rows(rows: Any) -> None:
    with golden.raises(TaskError, match=r"task\.prompts"):
        load_prompts(rows)


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
