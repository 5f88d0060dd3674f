"""The examples of docs/rewards.md run as they stand there, in the children of a reward worker."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.rewards import Sample
from asyncrl.rewards.execution.child_pool import ChildPool
from asyncrl.rewards.execution.scoring import score_of
from asyncrl.rewards.functions import function_problems, function_specs
from asyncrl.rewards.templates import TEMPLATES
from asyncrl.tasks import load_prompts
from tests.unit.documents import DOCS, blocks, config_of, files_of
from tests.unit.rewards.chat_server import chat_server, says

PAGE = "rewards.md"
SAMPLE = Sample("Add 1 and 2.", "3", {"prompt": "Add 1 and 2.", "answer": "3"}, 0, 0, "stop", 1)


def scores(config: Config, folder: Path, *samples: Sample) -> list[dict[str, float]]:
    """Returns the terms of each sample, and their weighted sum as `sum`; the samples are one group."""

    async def scored() -> list[dict[str, float]]:
        specs = function_specs(config)
        async with asyncio.TaskGroup() as tasks:
            pool = ChildPool(
                specs, tasks, workers=1, deadline=config.reward.deadline, start_deadline=60, printed=folder / "printed"
            )
            await pool.start()
            try:
                by_function = [await pool.run(number, samples) for number in range(len(specs))]
            finally:
                await pool.stop()
        found = [
            score_of(sample, specs, results, config.reward.on_error)
            for sample, results in zip(samples, zip(*by_function, strict=True), strict=True)
        ]
        return [score.terms | {"sum": score.reward} for score in found]

    assert function_problems(config) == []
    return asyncio.run(scored())


def test_functions(tmp_path: Path) -> None:
    files_of(PAGE, tmp_path)
    config = config_of(PAGE, "longest_first", tmp_path)
    first, second = scores(config, tmp_path, SAMPLE, replace(SAMPLE, text="It is 3.", member=1))
    assert first == {"right": 1, "tidy/short": -0.01, "tidy/ends": 0, "longest_first": 0, "sum": 0.999}
    assert second == {
        "right": 0,
        "tidy/short": -0.03,
        "tidy/ends": 1,
        "longest_first": 0.5,
        "sum": pytest.approx(0.597),
    }


def test_groups(tmp_path: Path) -> None:
    files_of(PAGE, tmp_path)
    config = config_of(PAGE, "rare.py", tmp_path)
    group = [replace(SAMPLE, text=text, member=member) for member, text in enumerate(("ab", "ab", "c", ""))]
    found = scores(config, tmp_path, *group)
    common = {"rare/rare": 0.5, "rare/length": -0.02, "sum": 0.48}
    assert found == [common, common, {"rare/rare": 1.0, "rare/length": -0.01, "sum": 0.99}, {"sum": None}]
    (held_out,) = config.evaluate.held_out
    assert [each.use for each in held_out.functions] == ["exact_match"]
    assert config.warnings == []


def test_templates(tmp_path: Path) -> None:
    (found,) = scores(config_of(PAGE, '"numeric"', tmp_path), tmp_path, replace(SAMPLE, text="so " * 28 + "about 3.01"))
    assert found == {"numeric": 1, "length": -0.5, "sum": 0.75}


def test_every_template_is_on_the_page() -> None:
    assert [name for name in TEMPLATES if f"`{name}`" not in (DOCS / PAGE).read_text()] == []


def test_a_reward_model_that_reads_text(tmp_path: Path) -> None:
    reward = config_of(PAGE, 'reads = "text"', tmp_path).reward
    assert (reward.model, reward.reads) == ("owner/name", "text")


def test_programs(bubblewrap_works: None, tmp_path: Path) -> None:
    files_of(PAGE, tmp_path)
    config = config_of(PAGE, "passes_tests", tmp_path)
    row: dict[str, Any] = load_prompts(config.task.prompts, {"size": 1, "seed": 0}).row(0).columns
    right, wrong = (replace(SAMPLE, text=f"def double(x):\n    return {body}", row=row) for body in ("2 * x", "x * x"))
    found = scores(config, tmp_path, right, wrong)
    assert [(each["compiles"], each["passes_tests"]) for each in found] == [(1, 1), (1, 0.5)]


def test_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")

    async def judged() -> list[dict[str, float]]:
        async with chat_server([says('{"score": 4}')]) as server:
            config = config_of(PAGE, "a-larger-model", tmp_path, **{"http://localhost:8000/v1": server.url})
            sample = replace(SAMPLE, row=SAMPLE.row | {"answer_wanted": "three"})
            found = await asyncio.to_thread(scores, config, tmp_path, sample)
            (asked,) = server.asked
        assert "Question: Add 1 and 2.\nA good answer says: three\nAnswer: 3\n" in asked["messages"][0]["content"]
        return found

    assert asyncio.run(judged()) == [{"judge": 0.75, "sum": 0.75}]


def test_episodes(tmp_path: Path) -> None:
    files_of(PAGE, tmp_path)
    turns = [
        {"role": role, "content": text} for role, text in (("assistant", "Thanks!"), ("user", "3"), ("assistant", "3"))
    ]
    config = config_of(PAGE, "polite.py", tmp_path)
    (found,) = scores(config, tmp_path, replace(SAMPLE, turns=turns, turn_rewards=[0.0, 1.0]))
    assert found == {"environment": 1.0, "thanks": 0.5, "sum": 1.05}


def test_tokens(tmp_path: Path) -> None:
    files_of(PAGE, tmp_path)
    sample = replace(SAMPLE, tokens=3, token_ids=[1, 2, 1], token_texts=[" Sorry", ",", "sorry"])
    (found,) = scores(config_of(PAGE, "steps.py:no_sorry", tmp_path), tmp_path, sample)
    assert found == {"no_sorry": -2.0, "sum": -0.4}


def test_no_example_is_left_out() -> None:
    assert [len(blocks(PAGE, "python")), len(blocks(PAGE, "toml"))] == [5, 8]
