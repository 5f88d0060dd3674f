"""Two generation workers join the quickstart by `asyncrl join`; one host is killed, and one joins again."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.controller.journal.journal import FIRST_BYTES
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.telemetry.jsonl import read_lines

sys.path.insert(0, str(Path(__file__).parent))
from programs import ForkedProgram, finished
from watching import PATIENCE, checkpoints_of, dead, pid_of, wait_until, workers_of

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

CLI = [sys.executable, "-m", "asyncrl.deploy.cli"]


@contextmanager
def program(*arguments: str, output: Path) -> Iterator["subprocess.Popen[str]"]:
    with output.open("w") as file:
        process = ForkedProgram([*CLI, *arguments], stdout=file, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def free_address() -> str:
    with closing(bound_socket("127.0.0.1", 0, "a test")) as socket:
        return f"tcp://127.0.0.1:{socket.getsockname()[1]}"


def steps_in(shown: Path) -> int:
    return len(re.findall(r"^step \d+/", shown.read_text(), re.MULTILINE))


def await_steps(shown: Path) -> None:
    """Waits for two more steps."""
    reached = steps_in(shown)
    wait_until(lambda: steps_in(shown) > reached + 1, shown.read_text)


def events(run_dir: Path, event: str) -> list[str]:
    """Returns the generation instances with this event, in its order."""
    lines = read_lines(run_dir / "logs" / "controller.jsonl")
    return [line["instance"] for line in lines if line["event"] == event and line["instance"].startswith("generation")]


def test_a_host_that_is_told_to_leave_finishes_its_groups_first(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    address = free_address()
    shown = tmp_path / "run.out"
    flags = ["--run-dir", str(run_dir), "--model.name", str(quickstart_model), "--steps", "5000", "--evaluate.prompts="]
    flags += ["--listen", address, "--fleet.joined", "{generation = 1}", "--generation.replicas", "1"]
    key = run_dir / "join_keys" / "generation.key"
    serve = ["join", "generation", "--to", address, "--key", str(key)]
    with program("run", "quickstart", *flags, output=shown) as run:
        wait_until(lambda: key.with_suffix(".admitted").exists(), "the keys of the run")
        with (
            program(*serve, output=tmp_path / "1.out") as leaves,
            program(*serve, output=tmp_path / "2.out") as stays,
        ):
            wait_until(lambda: "waits as a spare" in shown.read_text() and steps_in(shown) >= 1, shown.read_text)
            scaled = finished([*CLI, "scale", str(run_dir), "generation=2"], timeout=PATIENCE)
            assert scaled.stdout == "generation has places for 2 workers; generation1.0 may join\n", scaled.stderr
            wait_until(lambda: len(events(run_dir, "WorkerStarted")) == 2, shown.read_text)
            watch = ["monitor", address, "--once", "--key", str(run_dir / "join_keys" / "monitor.key")]
            watched = finished([*CLI, *watch], timeout=PATIENCE)
            assert "generation0.0" in watched.stdout, watched.stderr
            assert "tokens per s" in watched.stdout
            reached = steps_in(shown)
            wait_until(lambda: steps_in(shown) >= reached + 2, shown.read_text)
            leaves.send_signal(signal.SIGTERM)
            assert leaves.wait(30) == 0, (tmp_path / "1.out").read_text()
            reached = steps_in(shown)
            wait_until(lambda: steps_in(shown) > reached + 1, shown.read_text)
            run.send_signal(signal.SIGINT)
            assert run.wait(PATIENCE) == 0, shown.read_text()
            assert stays.wait(20) == 0
    assert "has left: it finished what it had" in shown.read_text()
    assert "its groups begin again" not in shown.read_text()
    assert FIRST_BYTES["attempt"] not in (run_dir / "journal").read_bytes(), "no group began again"
    assert audit(run_dir).ok


def test_a_trainer_that_joins_trains_and_its_death_ends_the_run_until_a_resume(
    quickstart_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    address = free_address()
    shown = tmp_path / "run.out"
    key = run_dir / "join_keys" / "training.key"
    again = tmp_path / "again.out"
    flags = ["--run-dir", str(run_dir), "--model.name", str(quickstart_model), "--steps", "5000", "--evaluate.prompts="]
    flags += ["--listen", address, "--fleet.joined", "{training = 1}", "--training.checkpoint_every", "5"]
    serve = ["join", "training", "--to", address, "--key", str(key)]
    with program("run", "quickstart", *flags, output=shown) as run:
        wait_until(lambda: key.with_suffix(".admitted").exists(), "the keys of the run")
        with program(*serve, output=tmp_path / "1.out") as trainer:
            wait_until(lambda: steps_in(shown) >= 12, shown.read_text)
            trainer.kill()
            assert run.wait(PATIENCE) == 75, shown.read_text()
    saved = max(checkpoints_of(run_dir))
    assert saved > 0, "the trainer saved checkpoints where the controller finds them"
    with program("run", "quickstart", *flags, output=again) as run, program(*serve, output=tmp_path / "2.out") as other:
        wait_until(lambda: steps_in(again) >= 3, again.read_text)
        other.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 0, again.read_text()
        assert other.wait(20) == 0, (tmp_path / "2.out").read_text()
    assert f"step {saved + 1}/" in again.read_text()
    trained = re.findall(r"^step (\d+)/", again.read_text(), re.MULTILINE)[-1]
    assert (run_dir / "checkpoints" / trained).exists(), "a trainer that leaves ends the run with a checkpoint"
    assert audit(run_dir).ok


def test_a_host_that_is_killed_joins_again_and_a_trainer_that_dies_ends_no_run(
    quickstart_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    address = free_address()
    shown = tmp_path / "run.out"
    key = run_dir / "join_keys" / "generation.key"
    flags = ["--run-dir", str(run_dir), "--model.name", str(quickstart_model), "--steps", "5000", "--evaluate.prompts="]
    flags += ["--listen", address, "--fleet.joined", "{generation = 2}", "--generation.replicas", "2"]
    serve = ["join", "generation", "--to", address, "--key", str(key)]

    def check(what: str) -> int:
        return finished([*CLI, *serve, "--check", what], timeout=20).returncode

    with program("run", "quickstart", *flags, output=shown) as run:
        wait_until(lambda: key.with_suffix(".admitted").exists(), "the keys of the run")
        wait_until(lambda: check("run") == 0, "the run to answer")
        assert check("worker") == 1, "no host has joined"
        with (
            program(*serve, output=tmp_path / "1.out") as killed,
            program(*serve, output=tmp_path / "2.out") as stays,
        ):
            wait_until(lambda: steps_in(shown) >= 3, shown.read_text)
            assert check("worker") == 0
            workers = workers_of(run_dir)
            killed.kill()
            wait_until(lambda: bool(events(run_dir, "WorkerLost")), "the loss to be known", 20.0)
            assert any(dead(pid) for pid in workers.values()), "a worker ends with its host"
            with program(*serve, output=tmp_path / "3.out") as again:
                wait_until(lambda: len(events(run_dir, "WorkerStarted")) == 3, "a worker in its place")
                (lost,) = events(run_dir, "WorkerLost")
                assert lost.partition("-")[0] == events(run_dir, "WorkerStarted")[-1].partition("-")[0]
                await_steps(shown)
                os.kill(pid_of(run_dir, "training"), signal.SIGKILL)
                wait_until(lambda: "the run goes on from its checkpoint of step" in shown.read_text(), shown.read_text)
                await_steps(shown)
                run.send_signal(signal.SIGINT)
                assert run.wait(PATIENCE) == 0, shown.read_text()
                assert (stays.wait(20), again.wait(20)) == (0, 0), "hosts leave at the end of the run"
    assert check("run") == 75, "the run has ended"
    assert re.search(r"lost generation\d\.0\S+: .*(broke|is gone)", shown.read_text()), shown.read_text()
    assert audit(run_dir).ok
