"""Workers are killed while the quickstart runs: it goes on or resumes, and the audit holds."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit

sys.path.insert(0, str(Path(__file__).parent))
from programs import ended, running, until_step
from watching import PATIENCE, checkpoints_of, dead, pid_of, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

STEPS = "25"


def command(model: Path, run_dir: Path, *flags: str, steps: str = STEPS) -> list[str]:
    keys = ["--model.name", str(model), "--steps", steps, "--training.checkpoint_every", "5", "--evaluate.every", "100"]
    keys += ["--task.samples_per_prompt", "4"]
    return [sys.executable, "-m", "asyncrl.deploy.cli", "run", "quickstart", "--run-dir", str(run_dir), *keys, *flags]


def audited(run_dir: Path) -> None:
    report = audit(run_dir)
    assert report.ok, str(report)


def last_metrics(run_dir: Path) -> dict[str, float]:
    line: dict[str, float] = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return line


PPO = ["--algorithm.preset", "ppo", "--algorithm.kl", "0.01"]
SHARDED = ["--critic.layout.shard", "2", "--training.layout.shard", "2"]
SAFE = ["--algorithm.preset", "safe_rlhf", "--cost.functions", "exact_match", "--cost.limit", "0.5"]
SAFE += ["--evaluate.prompts="]


@pytest.mark.parametrize("service", ["generation", "reward", "reference", "cost"])
def test_run_continues_after_a_worker_is_killed(service: str, quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = {"reference": ["--algorithm.kl", "0.01"], "cost": SAFE}.get(service, [])
    with running(command(quickstart_model, run_dir, *flags)) as process:
        until_step(process, 4)
        os.kill(pid_of(run_dir, service), signal.SIGKILL)
        code, shown = ended(process)
    assert code == 0, shown
    assert f"lost {service}0.0" in shown
    assert last_metrics(run_dir)["step"] == int(STEPS)
    assert last_metrics(run_dir)["staleness/max"] <= 2
    audited(run_dir)


@pytest.mark.parametrize(
    ("service", "rank", "flags", "end"),
    [
        ("training", 0, [], signal.SIGKILL),
        ("training", 1, ["--training.layout.shard", "2"], signal.SIGKILL),
        ("critic", 0, PPO, signal.SIGKILL),
        ("critic", 1, [*PPO, *SHARDED], signal.SIGKILL),
        ("critic", 0, [*PPO, "--fleet.watchdog", "5"], signal.SIGSTOP),
        ("cost_critic", 0, SAFE, signal.SIGKILL),
    ],
)
def test_without_restarts_of_the_trainer_the_printed_command_resumes_after_a_trainer_or_critic_died_or_hung(
    service: str, rank: int, flags: list[str], end: signal.Signals, quickstart_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with running(command(quickstart_model, run_dir, *flags, "--fleet.trainer_restarts", "0")) as process:
        until_step(process, 7)
        os.kill(pid_of(run_dir, service, rank), end)
        code, shown = ended(process)
    assert code == 75, shown
    assert f"{service}0.{rank} died: killed by SIGKILL" in shown
    resume = re.search(r"Resume with: \S*asyncrl (run .*)$", shown, re.MULTILINE)
    assert resume, shown
    audited(run_dir)
    with running([sys.executable, "-m", "asyncrl.deploy.cli", *resume[1].split()]) as process:
        code, shown = ended(process)
    assert code == 0, shown
    assert "resuming" in shown
    assert last_metrics(run_dir)["incarnation"] == 1
    assert last_metrics(run_dir).get("critic/updates", 0) == service.endswith("critic")
    assert last_metrics(run_dir).get("cost_critic/updates", 0) == (service == "cost_critic")
    audited(run_dir)


def test_every_checkpoint_contains_the_critic(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(command(quickstart_model, run_dir, *PPO, steps="6")) as process:
        code, shown = ended(process)
    assert code == 0, shown
    assert last_metrics(run_dir)["critic/updates"] == 1
    for version in ("5", "6"):
        folder = run_dir / "checkpoints" / version
        files = json.loads((folder / "manifest.json").read_text())["files"]
        assert {"trainer.pt", "critic/trainer.pt", "critic/model/model.safetensors"} <= files.keys()
        assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
            *files,
            "manifest.json",
        }
    (run_dir / "checkpoints" / "6" / "critic" / "trainer.pt").write_bytes(b"damaged")
    with running(command(quickstart_model, run_dir, *PPO, steps="7")) as process:
        code, shown = ended(process)
    assert code == 0, shown
    assert "checkpoint 6 cannot be used: critic/trainer.pt was changed or damaged" in shown
    audited(run_dir)


def test_killed_controller_leaves_no_orphan_and_the_same_command_resumes(
    quickstart_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with running(command(quickstart_model, run_dir)) as process:
        until_step(process, 7)
        pids = [pid_of(run_dir, service) for service in ("generation", "reward", "training")]
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    wait_until(lambda: all(dead(pid) for pid in pids), "the workers to end with their parent")
    audited(run_dir)
    done = last_metrics(run_dir)["step"]
    saved = max(checkpoints_of(run_dir))
    with running(command(quickstart_model, run_dir)) as process:
        code, shown = ended(process)
    assert code == 0, shown
    told = re.search(rf"resuming .* at step {saved} of 25(?:; step(?:s \d+ to)? (\d+) (?:is|are) done again)?:", shown)
    assert told, shown
    assert int(told[1] or saved) >= done
    audited(run_dir)


def sigterm_as_timeout_sends_it(process: "subprocess.Popen[str]") -> None:
    """To the process, and then to all of its group."""
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)


def ctrl_c(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("stop", [ctrl_c, sigterm_as_timeout_sends_it])
def test_signal_ends_the_run_with_a_checkpoint_and_the_same_command_resumes(
    stop: Callable[["subprocess.Popen[str]"], None], quickstart_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with running(command(quickstart_model, run_dir)) as process:
        until_step(process, 6)
        stop(process)
        began = time.monotonic()
        code, shown = ended(process)
        took = time.monotonic() - began
    assert code == 0, shown
    assert "checkpoint" in shown
    assert max(checkpoints_of(run_dir)) == last_metrics(run_dir)["version"] >= 6, f"after {took:.1f} s: {shown}"
    with running(command(quickstart_model, run_dir)) as process:
        code, shown = ended(process)
    assert code == 0, shown
    assert last_metrics(run_dir)["step"] == int(STEPS)
    audited(run_dir)


def test_second_ctrl_c_ends_the_run_at_once_and_names_the_newest_checkpoint(
    quickstart_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with running(command(quickstart_model, run_dir)) as process:
        until_step(process, 6)
        os.kill(pid_of(run_dir, "training"), signal.SIGSTOP)  # what is waited for never comes
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert any("Ctrl-C once more abandons the wait" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        code, shown = ended(process)
    assert code == 130, shown
    told = re.search(
        r"newest checkpoint is of step (\d+) \((.*)\)\. Go on with: \S*asyncrl run (.*)$", shown, re.MULTILINE
    )
    assert told, shown
    assert int(told[1]) == max(checkpoints_of(run_dir))
    assert Path(told[2]).is_dir()
    assert told[3].split() == command(quickstart_model, run_dir)[4:]
    assert not list(Path("/dev/shm").glob(f"asyncrl-{(run_dir / 'run.id').read_text()}*"))


def test_a_changed_config_is_refused_with_a_diff_unless_accepted(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(command(quickstart_model, run_dir, steps="2")) as process:
        assert ended(process)[0] == 0
    changed = ["--training.learning_rate", "1e-4"]
    with running(command(quickstart_model, run_dir, *changed, steps="3")) as process:
        code, shown = ended(process)
    assert code == 2
    assert "training.learning_rate: 0.0002 -> 0.0001" in shown
    with running(command(quickstart_model, run_dir, *changed, "--accept-changes", steps="3")) as process:
        code, shown = ended(process)
    assert code == 0, shown
    assert last_metrics(run_dir)["step"] == 3
    audited(run_dir)
