"""What is started to evaluate a model; the fleet itself is not."""

import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import asyncrl.deploy.standalone_evaluation as module
from asyncrl.api import Run, _reward_here
from asyncrl.config.schema import Config, RewardConfig
from asyncrl.config.sections.training_config import LayoutConfig
from asyncrl.config.toml_writer import dump
from asyncrl.controller.observers.evaluation import EpisodesEvaluation, Evaluation
from asyncrl.deploy import cli
from asyncrl.errors import ConfigError
from asyncrl.fleet.fleet import ServiceSpec
from tests import golden
from tests.hub import FIRST, SECOND

ROWS = [{"prompt": "reverse abo:", "answer": "oba"}]


class Started(Exception):
    """Stands for the fleet that would run now."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Specs and model folder of the fleet that was to be started."""
    seen: list[Any] = []

    @asynccontextmanager
    async def running_fleet(specs: Sequence[ServiceSpec], facts: Any, **_: object) -> Any:
        seen.extend([*specs, facts.model_dir])
        raise Started
        yield

    monkeypatch.setattr(module, "running_fleet", running_fleet)
    monkeypatch.setattr(module, "chosen_model", lambda run_dir, step: (tmp_path / "model", 3))
    return seen


class Asked(Exception):
    """Carries what an evaluation of a model was asked for."""


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ends an evaluation where its model would be started, with Asked(config, questions by set)."""

    async def evaluate_model(model: Path, config: Config, questions: Any, *_: object, **__: object) -> None:
        raise Asked(config, questions)

    monkeypatch.setattr(module, "evaluate_model", evaluate_model)
    monkeypatch.setattr(module, "chosen_model", lambda run_dir, step: (tmp_path / f"model-{step}", 3))


def config(*functions: str) -> Config:
    return Config.model_validate(
        {"model": {"name": "m"}, "task": {"prompts": "python:rows"}, "reward": {"functions": functions}}
    )


def run_of(path: Path, config: Config, services: Any = None) -> Run:
    path.mkdir()
    (path / "config.toml").write_text(dump(config))
    return Run(path, config, services or {})


def write_judge(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    save_file({"score.weight": torch.zeros(1, 1)}, folder / "model.safetensors")


def test_a_reward_of_this_process_is_served_here_again(started: list[Any], tmp_path: Path) -> None:
    services = _reward_here([lambda sample: 1.0], RewardConfig(), lambda line: None)
    with pytest.raises(Started):
        run_of(tmp_path / "run", config(), services).evaluate(ROWS)
    assert started[1] is services["reward"]


def test_a_reward_model_is_served_with_its_folder_or_refused(started: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    judged = config()
    write_judge(folder)
    judged = judged.model_copy(update={"reward": judged.reward.model_copy(update={"model": str(folder)})})
    with pytest.raises(Started):
        run_of(tmp_path / "run", judged).evaluate(ROWS)
    assert started[1].implementation == "asyncrl.services.reward_model:RewardModelService"
    assert started[1].options == {"model": str(folder)}
    (folder / "config.json").write_text('{"num_attention_heads": 4}')
    split = judged.reward.model_copy(update={"layout": LayoutConfig(tp=3)})
    with pytest.raises(ConfigError, match=r"^reward\.layout: .*: tp = 3 does not divide num_attention_heads = 4"):
        run_of(tmp_path / "split", judged.model_copy(update={"reward": split})).evaluate(ROWS)
    gone = judged.model_copy(update={"reward": judged.reward.model_copy(update={"model": "nowhere"})})
    with pytest.raises(ConfigError, match=r"^reward\.model: there is no folder nowhere"):
        run_of(tmp_path / "other", gone).evaluate(ROWS)


@pytest.mark.parametrize("service", ["reward", "cost"])
@pytest.mark.parametrize(
    ("noted", "used"), [({"owner/judge": FIRST}, FIRST), ({"owner/other": FIRST}, SECOND), (None, SECOND)]
)
def test_a_model_that_scores_is_that_of_the_commit_which_the_run_has_noted(
    started: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    service: str,
    noted: dict[str, str] | None,
    used: str,
) -> None:
    """The branch main of the hub, which the cache follows, has gone on since the run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--owner--judge"
    for commit in (FIRST, SECOND):
        write_judge(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SECOND)
    values = config("exact_match").model_dump() | {"algorithm": {"preset": "safe_rlhf"}}
    values["cost"] = {"limit": 1.0} | (
        {"model": "owner/judge"} if service == "cost" else {"functions": ["exact_match"]}
    )
    values["reward"] |= {"model": "owner/judge"} if service == "reward" else {}
    run = run_of(tmp_path / "run", Config.model_validate(values))
    if noted is not None:
        (tmp_path / "run" / "hub.json").write_text(json.dumps(noted))
    with pytest.raises(Started):
        run.evaluate(ROWS)
    (model,) = [each.options["model"] for each in started[1:-1] if each.name == service]
    assert Path(model).name == used
    assert noted is None or json.loads((tmp_path / "run" / "hub.json").read_text()) == noted


def test_rewards_and_costs_with_names_get_workers_of_their_own(started: list[Any], tmp_path: Path) -> None:
    costs = {"functions": [{"use": "length", "options": {"maximum": 8, "slack": 4}}], "limit": 0.5}
    named = config("exact_match").model_dump() | {"algorithm": {"preset": "safe_rlhf"}, "cost": costs}
    with pytest.raises(Started):
        run_of(tmp_path / "run", Config.model_validate(named)).evaluate(ROWS)
    services = {"reward": "asyncrl.services.reward:RewardService", "cost": "asyncrl.services.reward:RewardService"}
    assert {each.name: each.implementation for each in started[1:-1]} == services


def test_without_held_out_prompts_python_is_told_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.evaluate\(prompts=\.\.\.\)"):
        run_of(tmp_path / "run", config("exact_match")).evaluate()


def test_rewards_that_only_the_trainer_had(
    started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path / "run", config())
    for command in (["evaluate"], ["run", "--run-dir"]):
        assert cli.main([*command, str(tmp_path / "run")]) == 2
        golden.says(capsys.readouterr().err)
    assert started == []


def test_a_model_is_prepared_as_in_training(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def prepare(config: Config, target: Path, show: Any) -> Path:
        show("making it")
        return target.with_name(config.model.name.partition(":")[2])

    monkeypatch.setattr(module, "prepare", prepare)
    with pytest.raises(Started):
        cli.main(["evaluate", "warmed:reverse", "--task", "quickstart"])
    assert Path(started[-1]).name == "reverse"
    assert capsys.readouterr().err == "making it\n"


def test_a_folder_that_was_exported_is_evaluated_as_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def evaluate_model(*_: object, **__: object) -> list[Evaluation]:
        return [Evaluation(0, 8, 0.5, 0.1, None, 0, 1.0)]

    async def prepare(*_: object) -> Path:
        return tmp_path

    monkeypatch.setattr(module, "evaluate_model", evaluate_model)
    monkeypatch.setattr(module, "prepare", prepare)
    for content, status in (("", 0), ('{"model": "policy", "version": 12}', 0), ('{"version": "x"}', 2)):
        if content:
            (tmp_path / "asyncrl_export.json").write_text(content)
        assert cli.main(["evaluate", str(tmp_path), "--task", "quickstart"]) == status
        shown = capsys.readouterr()
        golden.says(shown.out + shown.err)


def test_an_exported_policy_that_acts_is_evaluated_as_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def evaluate_acting(*_: object) -> EpisodesEvaluation:
        return EpisodesEvaluation(0, 8, 0.5, 0.1, None, 0, 1.0)

    monkeypatch.setattr(module, "_evaluate_acting", evaluate_acting)
    (tmp_path / "asyncrl_export.json").write_text('{"model": "policy", "version": 12}')
    assert cli.main(["evaluate", str(tmp_path), "--task", "cartpole"]) == 0
    assert "version 12" in capsys.readouterr().out


def with_sets(tmp_path: Path) -> Config:
    lines = [f'{{"prompt": "{number}", "answer": "a"}}' for number in range(100)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    many = str(tmp_path / "many.jsonl")
    evaluate = {"prompts": many, "size": 8, "sets": {"hard": {"prompts": many, "size": 5}}}
    return Config.model_validate({**config("exact_match").model_dump(), "evaluate": evaluate})


@pytest.mark.usefixtures("questions")
def test_all_sets_are_evaluated_or_those_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_of(tmp_path / "run", with_sets(tmp_path)).path
    sizes = {}
    for flags in ((), ("--set", "hard"), ("--size", "2")):
        with pytest.raises(Asked) as asked:
            cli.main(["evaluate", str(path), *flags])
        sizes[flags] = {name: len(own) for name, own in asked.value.args[1].items()}
    assert sizes == {(): {"": 8, "hard": 5}, ("--set", "hard"): {"hard": 5}, ("--size", "2"): {"": 2, "hard": 2}}
    assert cli.main(["evaluate", str(path), "--set", "heard"]) == 2
    assert "there is no held-out set heard; did you mean hard?" in capsys.readouterr().err


@pytest.mark.usefixtures("questions")
def test_all_prompts_of_a_given_file_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_of(tmp_path / "run", with_sets(tmp_path)).path
    with pytest.raises(Asked) as asked:
        cli.main(["evaluate", str(path), "--prompts", str(tmp_path / "many.jsonl")])
    used, questions = asked.value.args
    assert {name: len(own) for name, own in questions.items()} == {"": 100}
    assert used.evaluate.set_of(-100).name == "", "the rewards of another set do not score the last ones"
    assert cli.main(["evaluate", str(path), "--prompts", str(tmp_path / "mani.jsonl")]) == 2
    assert "evaluate.prompts: there is no file" in capsys.readouterr().err
    assert cli.main(["evaluate", str(path), "--prompts", str(tmp_path / "many.jsonl"), "--set", "hard"]) == 2
    assert "name no set beside them" in capsys.readouterr().err
