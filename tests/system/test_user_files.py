"""Runs and the user's own files: a reward that prints, and files that change between two starts."""

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from torchless_runs import EXPERIMENT, Run  # noqa: E402

from asyncrl.children.printed_output import BLOCK, LARGEST  # noqa: E402
from asyncrl.deploy import cli  # noqa: E402

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

REWARD = """
from torchless_task import even

def reward(sample):
    print("what the policy wrote:", sample.text, "x" * 200_000)
    return even(sample)
"""

ATTACKER = """
import glob, os
from torchless_task import even

RUN = {run!r}
IN_REACH = {{
    "journal": lambda: open(RUN + "/journal").read(),
    "run directory": lambda: os.listdir(RUN),
    "a file in the run": lambda: open(RUN + "/mine", "w"),
    "variables": lambda: [name for name in os.environ if name.startswith("ASYNCRL_")],
    "sockets": lambda: glob.glob("/tmp/asyncrl-*/*"),
    "shared memory": lambda: os.listdir("/dev/shm"),
    "workers": lambda: [pid for pid in os.listdir("/proc") if pid.isdigit() and b"asyncrl worker" in named(pid)],
    "signals": lambda: [os.kill(pid, 0) for pid in range(2, 2**16) if pid != os.getpid()],
}}

def named(pid):
    return open("/proc/" + pid + "/cmdline", "rb").read()

def is_reached(attack):
    try:
        return bool(attack())
    except OSError:
        return False

def reward(sample):
    reached = [name for name, attack in IN_REACH.items() if is_reached(attack)]
    assert not reached, reached
    return even(sample)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of four steps whose prompts and reward are files beside its experiment."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"count {row}:"}) + "\n" for row in range(40)))
    text = EXPERIMENT.read_text().replace('"torchless_task:prompts"', '"rows.jsonl"')
    (tmp_path / "mine.toml").write_text(text.replace('"torchless_task:even"', '"rewards.py:reward"'))
    return Run(tmp_path / "run", ("--steps", "4"), str(tmp_path / "mine.toml"))


def test_a_reward_that_prints_megabytes_fills_no_disk_and_the_run_says_where_it_prints(run: Run) -> None:
    run.flags = ("--steps", "8")
    assert run.to_its_end() == 0, run.shown
    printed = run.directory / "logs" / "reward0.printed"
    assert run.shown.count(f"reward functions print something: {printed}") == 1
    files = [printed, printed.with_name("reward0.printed.old")]
    assert b"what the policy wrote" in files[1].read_bytes()
    assert printed.read_bytes().startswith(b"asyncrl: what was printed before is in"), "the last line may begin a file"
    assert sum(file.stat().st_size for file in files) <= 2 * (LARGEST + BLOCK)
    assert sum(file.stat().st_size for file in (run.directory / "logs").glob("*.out")) < 100_000
    run.leaves_nothing()


def test_a_reward_reaches_nothing_of_the_fleet_that_asks_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_NAME", "named-by-a-variable")
    (tmp_path / "rewards.py").write_text(ATTACKER.format(run=str(run.directory)))
    assert run.to_its_end() == 0, run.shown
    assert run.version == 4
    run.audited()
    run.leaves_nothing()


def test_a_resume_with_changed_files_is_refused_until_the_change_is_accepted(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = tmp_path / "rewards.py"
    rows = tmp_path / "rows.jsonl"
    assert run.to_its_end() == 0, run.shown
    rewards.write_text("from torchless_task import even as reward\n")
    rows.write_text(rows.read_text() + json.dumps({"prompt": "one more:"}) + "\n")

    run.flags = ("--steps", "6")
    assert run.to_its_end() == cli.MISTAKE, run.shown
    assert "began with other values or files" in run.shown
    for key, file in (("reward.functions", rewards), ("task.prompts", rows)):
        assert f"{key}: {file} has changed (SHA-256 " in run.shown
    assert "--accept-changes" in run.shown
    assert run.version == 4

    assert cli.main(["audit", str(run.directory)]) == 0
    audited = capsys.readouterr().out
    assert "copies of prompts and code have their digests: holds (2 compared)" in audited
    assert f"note: reward.functions: {rewards} has changed (SHA-256 " in audited

    run.flags = ("--steps", "6", "--accept-changes")
    assert run.to_its_end() == 0, run.shown
    assert f"changed: reward.functions: {rewards} has changed (SHA-256 " in run.shown
    assert run.version == 6
    run.audited()

    for copy in (run.directory / "sources").glob("*-rows.jsonl"):
        copy.write_text("other rows\n")
    capsys.readouterr()
    assert cli.main(["audit", str(run.directory)]) == 1
    audited = capsys.readouterr().out
    assert "copies of prompts and code have their digests: FAILS, 1 times; first: " in audited
    assert f"is not the {rows} that the run read for task.prompts" in audited
