"""A run is refused with all its problems at once, and says once what nothing reads; doctor prints the same."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deploy import cli
from asyncrl.deploy.checks import memory_needs
from asyncrl.deploy.commands import doctor
from asyncrl.deploy.preflight import preflight
from asyncrl.deploy.run_setup import RunRequest, run
from asyncrl.errors import ConfigError, TaskError
from asyncrl.telemetry.display import open_display

UNREAD = 'algorithm.dual_clip, algorithm.loss: nothing reads it with loss = "gspo": remove it'


def config(**sections: Any) -> Config:
    task = {"prompts": "nowhere.jsonl"}
    return Config.model_validate({"model": {"name": "warmed:reverse"}, "task": task, **sections})


async def started(chosen: Config, run_dir: Path) -> str:
    """Starts a run that is refused; returns what it printed and why it was refused."""
    stream = StringIO()
    with open_display(1, stream) as display, pytest.raises((ConfigError, TaskError)) as refused:
        await run(RunRequest(chosen, run_dir, display, "asyncrl run"))
    return f"{stream.getvalue()}{refused.value}"


async def test_a_run_says_once_what_nothing_reads(tmp_path: Path) -> None:
    chosen = config(algorithm={"preset": "gspo", "dual_clip": 3}, reward={"functions": ["exact_match"]})
    printed = await started(chosen, tmp_path / "run")
    assert "there is no file nowhere.jsonl" in printed
    assert printed.count(f"warning: {UNREAD}") == printed.count("warning") == 1


async def test_a_run_is_refused_with_all_problems_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_needs, "available_memory", lambda: 2**20)
    chosen = config(algorithm={"custom": "gone.py:ALGORITHM"}, reward={"functions": ["exact_mach"]})
    text = await started(chosen, tmp_path / "run")
    assert text.startswith("3 problems:\n")
    for part in ("of memory are available", "did you mean exact_match?", "gone.py"):
        assert part in text
    assert not (tmp_path / "run").exists()


def test_doctor_prints_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "machine_checks", list)
    path = tmp_path / "mine.toml"
    path.write_text(
        '[model]\nname = "warmed:reverse"\n[task]\nprompts = "nowhere.jsonl"\n'
        '[algorithm]\npreset = "gspo"\ndual_clip = 3\n'
    )
    assert cli.main(["doctor", str(path), "--reward.functions", "exact_mach"]) == 1
    printed = capsys.readouterr().out
    chosen = config(algorithm={"preset": "gspo", "dual_clip": 3}, reward={"functions": ["exact_mach"]})
    problems = list(preflight(chosen))
    assert [problem.is_warning for problem in problems] == [True, False]
    assert all(str(problem) in printed for problem in problems)
    assert f"note  algorithm.dual_clip {UNREAD}" in printed
