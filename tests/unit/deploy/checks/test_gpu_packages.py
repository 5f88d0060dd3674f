"""Packages of the extras cu12 and cu13, of which an environment may have one."""

import tomllib
from pathlib import Path

import pytest

from asyncrl.deploy.checks.machine import PAIRS, gpu_package_problems

BOTH = {"nvidia-nccl-cu12": "2.32.3", "nvidia-nccl-cu13": "2.30.7"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_wheels_of_nccl_are_refused_by_name_and_with_what_to_do(device: str) -> None:
    (problem,) = gpu_package_problems({"training.device": device}, BOTH.get)
    assert problem.is_warning == (device == "cpu")
    text = str(problem)
    assert "nvidia-nccl-cu12 2.32.3 and nvidia-nccl-cu13 2.30.7 are both installed" in text
    assert "pip uninstall --yes nvidia-nccl-cu12 nvidia-nccl-cu13" in text
    assert "[cu12]" in text
    assert "[cu13]" in text


@pytest.mark.parametrize("only", BOTH)
def test_one_of_them_is_fine(only: str) -> None:
    assert not list(gpu_package_problems({"training.device": "cuda"}, {only: "2"}.get))


def test_the_extras_hold_what_excludes_each_other() -> None:
    extras = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for older, newer in PAIRS:
        assert any(line.startswith(older) for line in extras["cu12"])
        assert any(line.startswith(newer) for line in extras["cu13"])
