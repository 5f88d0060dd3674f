"""What runs out, hangs or breaks under a run: each ends in recovery or in one clear error, and nothing is left."""

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from asyncrl.config.sources import load
from asyncrl.deploy.process.interrupts import STOPPING
from asyncrl.deploy.process.local_launcher import OWN_DESCRIPTORS, WORKERS_DESCRIPTORS
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.fleet.launching.launcher import STOP_STAGES

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from torchless_runs import Run  # noqa: E402
from watching import PATIENCE, dead, wait_until  # noqa: E402

pytestmark = [pytest.mark.fleet, pytest.mark.kills, pytest.mark.usefixtures("programs")]

STEPS = ("--steps", "40")
WORKERS = ("generation", "reward", "training")


def test_workers_suspended_for_a_second_lose_no_samples(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", STEPS)
    with run.running() as process:
        for service in WORKERS:
            run.until_step(process, run.version + 5)
            stopped(run.pid_of(service), 1.0)
        assert process.wait(PATIENCE) == 0, run.shown
    assert "lost" not in run.shown
    run.audited()
    run.leaves_nothing()


def test_hung_generation_worker_is_replaced_within_the_publish_deadline(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", (*STEPS, "--staleness.publish_deadline", "1", "--generation.replicas", "2"))
    with run.running() as process:
        run.until_step(process, 5)
        stuck, healthy = (pid for service, pid in run.workers() if service == "generation")
        os.kill(stuck, signal.SIGSTOP)
        wait_until(lambda: dead(stuck), "the death of the generator", 10.0)
        assert not dead(healthy), run.shown
        assert process.wait(PATIENCE) == 0, run.shown
    assert run.shown.count("did not take over new weights in time; it is killed and started again") == 1
    run.audited()
    run.leaves_nothing()


def test_hung_reward_worker_is_replaced_and_no_group_is_poisoned(tmp_path: Path) -> None:
    deadlines = ("--fleet.watchdog", "5", "--fleet.call_deadline", "20", "--generation.deadline", "15")
    run = Run(tmp_path / "run", (*STEPS, *deadlines))
    with run.running() as process:
        stuck = stopped_for_good(run, process, "reward")
        wait_until(lambda: dead(stuck), "the death of the reward worker", 15.0)
        assert process.wait(PATIENCE) == 0, run.shown
    assert run.shown.count("has answered no call for 5 s, not even for its health; it is killed and started again") == 1
    assert "poison" not in run.shown
    run.audited()
    run.leaves_nothing()


def test_reward_worker_without_progress_is_replaced_within_the_deadline_of_a_call(tmp_path: Path) -> None:
    deadlines = ("--fleet.call_deadline", "2", "--generation.deadline", "2", "--reward.deadline", "1")
    run = Run(tmp_path / "run", (*STEPS, *deadlines))
    with run.running() as process:
        stuck = stopped_for_good(run, process, "reward")
        wait_until(lambda: dead(stuck), "the death of the reward worker", 15.0)
        assert process.wait(PATIENCE) == 0, run.shown
    assert re.search(r"reward0.* did not answer score within 2 s.* is killed and started again", run.shown)
    assert "poison" not in run.shown
    run.audited()
    run.leaves_nothing()


def test_hung_trainer_starts_again_and_without_restarts_ends_the_run_with_the_command_that_resumes(
    tmp_path: Path,
) -> None:
    deadlines = ("--fleet.call_deadline", "2", "--generation.deadline", "2", "--reward.deadline", "1")
    run = Run(tmp_path / "run", (*STEPS, *deadlines, "--fleet.trainer_restarts", "0"))
    with run.running() as process:
        stopped_for_good(run, process, "training")
        assert process.wait(PATIENCE) == 75, run.shown
    one_line_error(run, r"^asyncrl: .*training0.* did not answer \w+ within")
    run.leaves_nothing()
    run.audited()
    run.flags = (*STEPS, *deadlines, "--fleet.trainer_restarts", "1")
    with run.running() as process:
        run.until_step(process, run.version + 5)
        os.kill(run.pid_of("training"), signal.SIGSTOP)
        assert process.wait(PATIENCE) == 0, run.shown
    told = r"training0.* did not answer \w+ within 2 s.* is killed and started again"
    assert re.search(told, run.shown), run.shown
    assert "training0.0 died: killed by SIGKILL; the run goes on from its checkpoint" in run.shown
    run.audited()


@pytest.mark.long
@pytest.mark.parametrize("service", ["controller", *WORKERS])
def test_run_survives_a_process_suspended_for_a_minute(service: str, tmp_path: Path) -> None:
    """A generator keeps the trainer from writing and is replaced at the publish deadline; the others are waited for:
    their calls may take longer than a minute."""
    run = Run(tmp_path / "run", STEPS)
    with run.running() as process:
        run.until_step(process, 5)
        stopped(process.pid if service == "controller" else run.pid_of(service), 60.0)
        assert process.wait(PATIENCE) == 0, run.shown
    replaced = "did not take over new weights in time; it is killed and started again" in run.shown
    assert replaced == (service == "generation") or service == "controller", run.shown
    run.audited()
    run.leaves_nothing()


def stopped(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    with suppress(ProcessLookupError):  # It was replaced.
        os.kill(pid, signal.SIGCONT)


def test_killed_reward_processes_restart_without_losing_samples(tmp_path: Path) -> None:
    """As the kernel kills them where memory runs out: the guard, or the one that it guards."""
    run = Run(tmp_path / "run", STEPS)
    with run.running() as process:
        for whole in (False, True, False, True):
            run.until_step(process, run.version + 5)
            wait_until(lambda: bool(children(run.pid_of("reward"))), "a process that scores, after the last was killed")
            guards = children(run.pid_of("reward"))
            for pid in guards if whole else [runner for guard in guards for runner in children(guard)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert process.wait(PATIENCE) == 0, run.shown
    assert "lost" not in run.shown
    assert "reward failed" not in run.shown
    run.audited()
    run.leaves_nothing()


def stopped_for_good(run: Run, process: subprocess.Popen[str], service: str) -> int:
    """The worker of this service, once the run trains."""
    run.until_step(process, 5)
    stuck = run.pid_of(service)
    os.kill(stuck, signal.SIGSTOP)
    return stuck


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


# ---- memory and disk -------------------------------------------------------------------------------------


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs a file system that is small: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def one_line_error(run: Run, pattern: str) -> None:
    (told,) = [line for line in run.shown.splitlines() if line.startswith("asyncrl: ")]
    assert re.search(pattern, told), run.shown
    assert re.search(r"Resume with: \S*asyncrl run", told)
    assert "Traceback" not in run.shown


def test_full_disk_gives_one_error_and_the_run_resumes_when_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "600k"):
        run = Run(tmp_path / "run", ("--steps", "1000000"))
        run.directory.symlink_to(disk)
        code = run.to_its_end()
        assert code == 75, run.shown
        one_line_error(run, "^asyncrl: the disk is full: .*No space left on device")
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        run.audited()
        run.leaves_nothing()
        run.goes_on(5)


def test_full_disk_during_a_checkpoint_gives_one_error_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    """Libraries tell of it in words of their own; what was written of the checkpoint is gone."""
    tokenizer = build_tokenizer(())
    build_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    flags = ("--model.name", str(tmp_path / "model"), "--steps", "100000", "--evaluate.prompts", "")
    flags += ("--training.checkpoint_every", "1")
    disk = tmp_path / "disk"
    with small_disk(disk, "700k"):
        run = Run(tmp_path / "run", flags, "quickstart", standins=False)
        run.directory.symlink_to(disk)
        assert run.to_its_end() == 75, run.shown
        one_line_error(run, r"^asyncrl: the disk is full: training0\[0\] raised .*No space left on device")
        run.leaves_nothing()
        assert [path.name for path in (disk / "checkpoints").iterdir()] == ["0"], "a link"
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        run.goes_on(2)


def test_rows_take_their_real_bytes_of_a_small_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of this run are a number; those of a model of unknown size are not counted before the start."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    run = Run(tmp_path / "run", (*STEPS, "--model.name", "none"), wrapper=small_shared_memory("16k"))
    assert run.to_its_end() == 0, run.shown
    run.audited()
    run.leaves_nothing()


def small_shared_memory(size: str) -> tuple[str, ...]:
    """A command that runs another one with so little in /dev/shm."""
    private = ("unshare", "--user", "--map-root-user", "--mount")
    if subprocess.run([*private, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own")
    return (*private, "bash", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "bash")


def test_a_fleet_that_needs_more_file_descriptors_than_there_are_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", STEPS, wrapper=("bash", "-c", 'ulimit -n 40 && exec "$@"', "bash"))
    assert run.to_its_end() == 2, run.shown
    told = run.shown.splitlines()[-1]
    assert re.fullmatch(r"asyncrl: a fleet of 3 workers needs up to (\d+) file descriptors a process, .* -n \1.*", told)
    assert not run.directory.exists()


def test_fleet_runs_with_exactly_enough_file_descriptors(tmp_path: Path) -> None:
    needed = OWN_DESCRIPTORS + 3 * WORKERS_DESCRIPTORS
    run = Run(
        tmp_path / "run", STEPS, wrapper=("bash", "-c", f'ulimit -S -n 20; ulimit -H -n {needed}; exec "$@"', "bash")
    )
    with run.running() as process:
        for service in ("generation", "reward"):
            run.until_step(process, run.version + 5)
            os.kill(run.pid_of(service), signal.SIGKILL)
        assert process.wait(PATIENCE) == 0, run.shown
    run.leaves_nothing()


def test_exhausted_file_descriptors_give_one_error(tmp_path: Path) -> None:
    """The process that takes a dead worker's place cannot be started."""
    run = Run(tmp_path / "run", ("--steps", "1000000"))
    with run.running() as process:
        run.until_step(process, 5)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, 3))
        os.kill(run.pid_of("generation"), signal.SIGKILL)
        assert process.wait(PATIENCE) == 75, run.shown
    one_line_error(run, "^asyncrl: a process has as many files open as it may")
    run.leaves_nothing()
    run.audited()


# ---- a person in a hurry --------------------------------------------------------------------------------


def test_second_ctrl_c_does_not_wait_for_starting_workers(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", STEPS)
    with run.running() as process:
        wait_until(lambda: len(run.workers()) == len(WORKERS), "all workers")
        for _, pid in run.workers():
            os.kill(pid, signal.SIGSTOP)  # It hears neither "stop" nor SIGTERM; it would be waited for 7 s.
        process.send_signal(signal.SIGINT)
        wait_until(lambda: STOPPING in run.shown, lambda: f"a word about it: {run.shown}", 3.0)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130, run.shown
        assert time.monotonic() - begun < STOP_STAGES[0][1]
    assert "there is no checkpoint yet" in run.shown.splitlines()[-1]
    run.leaves_nothing()


@pytest.mark.parametrize("between", [0.0, 0.05, 0.1, 0.2])
def test_a_second_ctrl_c_right_after_the_first_leaves_the_command_that_goes_on(tmp_path: Path, between: float) -> None:
    run = Run(tmp_path / "run", STEPS)
    with run.running() as process:
        run.until_step(process, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(between)  # What is tested is this time.
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
    assert f"--run-dir {run.directory}" in run.shown.splitlines()[-1]
    assert "Traceback" not in run.shown
    run.leaves_nothing()


# ---- user code -------------------------------------------------------------------------------------------


def test_reward_functions_that_fork_and_hang_lose_only_their_samples(tmp_path: Path) -> None:
    flags = ("--steps", "10", "--reward.functions", "torchless_task:forks_and_hangs", "--reward.deadline", "0.3")
    run = Run(tmp_path / "run", (*flags, "--reward.on_error", "ignore"))
    assert run.to_its_end() == 0, run.shown
    run.audited()
    run.leaves_nothing()
    assert "unscorable" in (run.directory / "metrics.jsonl").read_text()


# ---- files under a run -----------------------------------------------------------------------------------


@pytest.mark.long
def test_truncated_model_file_gives_one_error_or_is_harmless(tmp_path: Path) -> None:
    """Whoever has loaded it goes on; whoever is started again cannot load it, and says so."""
    model = asyncio.run(prepare(load("quickstart").config, tmp_path / "model", print, 3 * PATIENCE))
    run = Run(
        tmp_path / "run",
        ("--model.name", str(model), "--steps", "100000", "--evaluate.prompts", "", "--training.checkpoint_every", "5"),
        "quickstart",
        standins=False,
    )
    with run.running() as process:
        run.until_step(process, 3)
        weights = model / "model.safetensors"
        whole = weights.read_bytes()
        os.truncate(weights, len(whole) // 2)
        run.until_step(process, run.version + 10)
        os.kill(run.pid_of("generation"), signal.SIGKILL)
        assert process.wait(3 * PATIENCE) == 75, run.shown  # six starts, each of which loads torch
    one_line_error(run, "generation0.0 died 6 times .* could not start on ")
    run.leaves_nothing()
    weights.write_bytes(whole)
    run.goes_on(5)
