"""Copies of another process with the CPU as the device, and MPS with a stand-in for its program."""

import os
from pathlib import Path

import pytest

from asyncrl.bench.gpu import two_processes
from asyncrl.bench.gpu.bench_device import CONTROL, BenchDevice, HostTimer, NotMeasured, mps_daemon
from asyncrl.bench.gpu.nccl_ranks import nccl_under_mps
from asyncrl.bench.gpu.two_processes import copies_of_another_process, copies_of_another_process_under_mps
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda

MPS = """#!/bin/sh
echo "$@ $(test -n "$1" || cat) in $CUDA_MPS_PIPE_DIRECTORY" >> {log}
exit {status}
"""


def bench(device: str = "cpu") -> BenchDevice:
    return BenchDevice(device, HostTimer(), TwinCuda(), 1 << 20)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Path:
    """Puts a stand-in for the program of MPS into the path; returns the file with its calls."""
    program = folder / CONTROL
    log = folder / "calls"
    program.write_text(MPS.format(log=log, status=status))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


def test_steps_are_measured_alone_and_beside_copies() -> None:
    found = copies_of_another_process(bench())
    assert list(found) == ["steps_a_second", "share_beside_another_process"]
    assert all(value > 0 for value in found.values())


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(NotMeasured, match="device string: nonsense"):
        copies_of_another_process(bench("nonsense"))


def test_mps_runs_for_both_processes_and_ends_with_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install(tmp_path, monkeypatch)
    environments = []
    monkeypatch.setattr(two_processes, "copies_of_another_process", lambda _, given: environments.append(given) or {})
    assert copies_of_another_process_under_mps(bench()) == {}
    (variables,) = environments
    folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
    assert log.read_text().splitlines() == [f"-d  in {folder}", f" quit in {folder}"]
    assert not Path(folder).exists()


def test_a_measurement_that_fails_ends_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError), mps_daemon():
        raise RuntimeError("CUDA error")
    assert "quit" in log.read_text()


def test_without_mps_both_measurements_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for measure in (nccl_under_mps, copies_of_another_process_under_mps):
        with pytest.raises(NotMeasured, match="not installed"):
            measure(bench())
    install(tmp_path, monkeypatch, status=1)
    for measure in (nccl_under_mps, copies_of_another_process_under_mps):
        with pytest.raises(NotMeasured, match="did not start"):
            measure(bench())
