"""A training rank or a critic is killed, or hangs, while the quickstart runs: those that learn start again from the
checkpoint; the other workers stay the processes that they were, and the run ends at its last step.
"""

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.telemetry.jsonl import read_lines

sys.path.insert(0, str(Path(__file__).parent))
from programs import ended, running, until_step
from watching import dead, pid_of

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

STEPS = 20
PPO = ["--algorithm.preset", "ppo", "--algorithm.kl", "0.01"]
REPLICAS = ["--training.layout.dp", "2", "--fleet.watchdog", "8"]
SHARDS = ["--training.layout.shard", "2", "--weights.transport", "file"]
OTHERS = ("generation", "reward")
TOLD = r"(\w+)0\.(\d) died: killed by SIGKILL; the run goes on from its checkpoint of step (\d+)"


def command(model: Path, run_dir: Path, *flags: str) -> list[str]:
    keys = ["--model.name", str(model), "--steps", str(STEPS), "--training.checkpoint_every", "5"]
    keys += ["--task.samples_per_prompt", "4", "--evaluate.every", "100"]
    return [sys.executable, "-m", "asyncrl.deploy.cli", "run", "quickstart", "--run-dir", str(run_dir), *keys, *flags]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return list(read_lines(run_dir / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("killed", "flags", "others"),
    [
        ([("training", 1), ("training", 0)], REPLICAS, OTHERS),
        ([("training", 1), ("training", 0)], SHARDS, OTHERS),
        ([("critic", 0)], PPO, (*OTHERS, "reference")),
    ],
    ids=["replicas", "shards", "critic"],
)
def test_other_workers_outlive_the_death_of_one_that_learns(
    killed: list[tuple[str, int]], flags: list[str], others: tuple[str, ...], quickstart_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shown = ""
    with running(command(quickstart_model, run_dir, *flags)) as process:
        shown += until_step(process, 3)
        before = {service: pid_of(run_dir, service) for service in others}
        for number, (service, rank) in enumerate(killed):
            shown += until_step(process, 7 + 5 * number)
            hangs = flags == REPLICAS and number == 1
            os.kill(pid_of(run_dir, service, rank), signal.SIGSTOP if hangs else signal.SIGKILL)
        shown += until_step(process, 18)
        files = [path.name for path in run_dir.glob("weights/*/*.safetensors")]
        assert {name.split("-")[1] for name in files} == ({str(len(killed))} if flags == SHARDS else set()), files
        assert {service: pid_of(run_dir, service) for service in others} == before
        assert not any(dead(pid) for pid in before.values())
        code, rest = ended(process)
    assert code == 0, shown + rest
    told = re.findall(TOLD, shown)
    assert [(service, int(rank)) for service, rank, *_ in told] == killed, shown
    lines = metrics(run_dir)
    assert all(int(step) % 5 == 0 for *_, step in told), shown
    if flags == REPLICAS:
        assert re.search(r"training0\.0-\S+ has answered no call for 8 s.*; it is killed and started again", shown)
    repeated = Counter(line["step"] for line in lines)
    assert [*repeated] == [*range(1, STEPS + 1)], repeated
    assert max(Counter((line["incarnation"], line["step"]) for line in lines).values()) == 1
    assert list(dict.fromkeys(sample["step"] for sample in read_lines(run_dir / "samples.jsonl"))) == [*repeated]
    assert lines[-1]["step"] == STEPS
    assert lines[-1]["incarnation"] == len(killed)
    assert max(line["staleness/max"] for line in lines) <= 2
    assert not list(Path("/dev/shm").glob(f"asyncrl-{(run_dir / 'run.id').read_text()}*"))
    report = audit(run_dir)
    assert report.ok, str(report)
