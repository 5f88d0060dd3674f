"""The files that a run offers to hosts that join, by service."""

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.sources import load
from asyncrl.deploy.run_fleet import offered_files
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.data.file_cache import OfferedFiles


@pytest.fixture
def facts(tmp_path: Path) -> RunFacts:
    for name in (
        "run/config.toml",
        "run/logs/longest_prompts.jsonl",
        "model/model.safetensors",
        "model/tokenizer.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return RunFacts("ab", tmp_path / "run", tmp_path / "model", 0, "none", load("quickstart").config)


def names(offered: list[OfferedFiles]) -> dict[str, list[str]]:
    return {f"{each.use} {each.folder.name}": list(each.present()) for each in offered}


def test_a_generator_reads_the_model_and_the_prompts_that_it_checks(facts: RunFacts) -> None:
    assert names(list(offered_files("generation", facts, {}))) == {
        "run run": ["config.toml"],
        "folder model": ["model.safetensors", "tokenizer.json"],
        "files logs": ["longest_prompts.jsonl"],
    }


@pytest.mark.parametrize("service", ["training", "critic", "cost_critic"])
def test_who_writes_checkpoints_has_to_see_the_run_directory_of_this_start(facts: RunFacts, service: str) -> None:
    (facts.run_dir / "run.start").write_text("ab")
    assert names(list(offered_files(service, facts, {}))) == {
        "shared run": ["config.toml", "run.start"],
        "folder model": ["model.safetensors", "tokenizer.json"],
    }


@pytest.mark.parametrize("by_file", [True, False])
def test_a_reward_worker_reads_the_tokenizer_and_code_of_the_user(
    facts: RunFacts, by_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "code")
    (tmp_path / "code" / "my_rewards_here.py").write_text("import my_helper\ndef score(sample): return 1.0\n")
    (tmp_path / "code" / "my_helper.py").write_text("")
    (tmp_path / "code" / "unrelated.py").write_text("")
    monkeypatch.chdir(tmp_path / "code")
    use = f"{tmp_path}/linked/my_rewards_here.py:score" if by_file else "my_rewards_here:score"
    config = load("quickstart", flags=["--reward.functions", f'["exact_match", "{use}"]']).config
    assert names(list(offered_files("reward", replace(facts, config=config), {}))) == {
        "run run": ["config.toml"],
        "folder model": ["tokenizer.json"],
        ("files linked" if by_file else "module code"): ["my_helper.py", "my_rewards_here.py"],
    }


def test_code_of_asyncrl_itself_is_offered_to_nobody(facts: RunFacts) -> None:
    config = load("guess", flags=["--environment.use", "asyncrl.environments.builtin.guess:Guess"]).config
    offered = list(offered_files("environment", replace(facts, config=config), {}))
    assert [each.use for each in offered] == ["run", "folder"]
