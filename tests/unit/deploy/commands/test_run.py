"""asyncrl run: what it takes from its arguments, and what it refuses."""

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from asyncrl.config.install_hints import program
from asyncrl.config.schema import Config
from asyncrl.config.sources import Loaded
from asyncrl.config.toml_writer import dump
from asyncrl.deploy import cli
from asyncrl.deploy.commands import run
from asyncrl.deploy.process import fork_client
from asyncrl.deploy.process.fork_client import Forks
from asyncrl.errors import Interrupted

TOML = """\
[model]
name = "m"
[task]
prompts = "p.jsonl"
[reward]
functions = ["numeric"]
"""


class Trained:
    """Stands where the run begins, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Config, Path, bool, str]] = []

    def __call__(
        self, loaded: Loaded, run_dir: Path, request: run.RunCommand, command: str, begun: Forks | None
    ) -> int:
        self.asked.append((loaded.config, run_dir, request.accept_changes, command))
        return 0


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trained:
    trained = Trained()
    monkeypatch.setattr(run, "train", trained)
    monkeypatch.setattr(fork_client, "early_forks", nullcontext)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(TOML)
    return trained


def test_flags_reach_the_config_and_the_directory(trained: Trained) -> None:
    assert cli.main(["run", "mine.toml", "--seed", "7", "--run-dir", "there", "--staleness.limit=0"]) == 0
    ((config, run_dir, accept, command),) = trained.asked
    assert (config.seed, config.staleness.limit, run_dir, accept) == (7, 0, Path("there"), False)
    assert command == f"{program()} run mine.toml --seed 7 --run-dir there --staleness.limit=0"


def test_without_a_directory_a_new_one_is_named_and_the_command_to_resume_says_it(trained: Trained) -> None:
    assert cli.main(["run", "mine.toml", "--accept-changes"]) == 0
    ((_, run_dir, accept, command),) = trained.asked
    assert run_dir.parent == Path("runs")
    assert run_dir.name.startswith("mine-2")
    assert accept
    assert "--accept-changes" not in command, "further changes would be taken over unseen"
    assert command.endswith(f"--run-dir {run_dir}")


def test_a_run_directory_alone_resumes_with_its_own_config(trained: Trained, tmp_path: Path) -> None:
    config = Config.model_validate(
        {"name": "old", "seed": 9, "model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"functions": ["x"]}}
    )
    (tmp_path / "config.toml").write_text(dump(config))
    assert cli.main(["run", f"--run-dir={tmp_path}", "--steps", "7"]) == 0
    ((found, run_dir, _, _),) = trained.asked
    assert (found.name, found.seed, found.steps, run_dir) == ("old", 9, 7, tmp_path)


def test_print_config_shows_every_value_and_its_place_and_runs_nothing(
    trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["run", "mine.toml", "--print-config", "--steps", "5"]) == 0
    text = capsys.readouterr().out
    assert "steps = 5  # --steps" in text
    assert f'prompts = "{tmp_path}/p.jsonl"  # mine.toml:4' in text
    assert 'policy = "mask"  # default' in text
    assert trained.asked == []
    (tmp_path / "again.toml").write_text(text)
    assert cli.main(["run", "again.toml"]) == 0


def test_restarts_run_a_child_that_does_not_restart(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int, Path]] = []
    monkeypatch.setattr(run, "run_with_restarts", lambda *given: asked.append(given) or 0)
    assert cli.main(["run", "mine.toml", "--restarts", "2", "--seed", "1", "--run-dir", "d"]) == 0
    ((arguments, times, directory),) = asked
    assert (times, directory.name) == (2, "d")
    assert arguments == ["mine.toml", "--seed", "1", "--run-dir", "d", "--fleet.restarts=0"]
    assert trained.asked == []
    assert cli.main(["run", *arguments]) == 0
    assert len(trained.asked) == 1


@pytest.mark.parametrize("pressed", [KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("interrupted", [Interrupted("step 3. Go on with: the command"), None])
def test_an_interrupt_that_the_run_does_not_handle_names_the_command(
    pressed: BaseException,
    interrupted: Interrupted | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted_twice(*_: object) -> int:
        if interrupted is None:
            raise pressed
        try:
            raise interrupted
        finally:
            raise pressed

    monkeypatch.setattr(run, "_train", interrupted_twice)
    monkeypatch.setattr(fork_client, "early_forks", nullcontext)
    (tmp_path / "mine.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "mine.toml", "--run-dir", "there"]) == 130
    found = capsys.readouterr().err
    assert found == f"asyncrl: {interrupted or f'interrupted. Go on with: {program()} run mine.toml --run-dir there'}\n"


def test_the_same_flag_may_stand_twice_only_for_lists() -> None:
    request = run.parse(["quickstart", "--generation.stop", "a", "--generation.stop", "b"])
    assert request.flags == ["--generation.stop", "a", "--generation.stop", "b"]
