"""Checks of the machine: what is found, and what to do when it is bad."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import asyncrl
from asyncrl.deploy.checks import machine
from asyncrl.deploy.checks.machine import (
    PAIRS,
    available_memory,
    device_mistakes,
    gpu_package_problems,
    machine_checks,
    requirements,
    sandbox_check,
    shared_memory_check,
    size_text,
    sockets_check,
    torch_check,
)
from tests import golden


def test_the_checkout_is_named() -> None:
    package = next(found for found in machine_checks() if found.name == "package")
    assert package.found == f"{Path(machine.__file__).parents[2]}: a checkout"


def test_shared_memory_is_there_or_not(tmp_path: Path) -> None:
    there = shared_memory_check(tmp_path)
    assert there.status == "ok"
    assert " free of " in there.found
    assert shared_memory_check(tmp_path / "gone").status == "bad"


def test_a_container_gives_up_the_files_that_it_keeps_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"memory.max": "1000", "memory.current": "900"}
    stat = {"memory.stat": "anon 300\nfile 600\nshmem 100\ninactive_file 400\nactive_file 100\n"}
    for name, text in (limits | stat).items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "CONTAINER", tmp_path)
    assert available_memory() == 600


def test_devices_that_torch_cannot_use_are_bad_and_the_cpu_is_not_asked_for() -> None:
    assert device_mistakes({"generation.device": "cpu"}) == []
    (found,) = device_mistakes({"generation.device": "cpu", "training.device": "cuda:99"})
    assert not found.is_warning
    assert str(found).startswith('training.device: "cuda:99" cannot be used: ')


def test_a_long_temporary_folder_leaves_no_room_for_sockets(tmp_path: Path) -> None:
    assert sockets_check("/tmp").status == "ok"
    assert "TMPDIR" in sockets_check("/tmp/" + "x" * 60).remedy


def test_packages_come_from_the_install() -> None:
    assert {"torch", "pyzmq", "numpy"} <= set(requirements()[""])
    assert "pytest" not in requirements()[""]
    assert requirements()["wandb"] == ["wandb"]
    assert "dev" not in requirements()


def test_a_torch_that_fails_is_reported_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = torch_check()
    assert found.status == "bad"
    assert "libcudart.so.12" in found.found
    assert found.remedy.endswith("-m pip install --force-reinstall torch")


def test_a_torch_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(machine, "IMPORT_DEADLINE", 0.5)
    assert "took over" in torch_check().found


def test_the_doctor_works_without_most_of_the_install(tmp_path: Path) -> None:
    experiment = tmp_path / "mine.toml"
    experiment.write_text("steps = 3\n")
    program = (
        "import sys\n"
        "for name in ('pydantic', 'rich', 'numpy', 'zmq', 'msgpack', 'structlog'): sys.modules[name] = None\n"
        "from asyncrl.deploy.checks import machine\n"
        "machine.torch_check = lambda: machine.Check('import torch', 'ok', '')\n"
        "from asyncrl.deploy.commands import doctor\n"
        "doctor.fork_check = lambda: machine.Check('forked workers', 'ok', '')\n"
        "from asyncrl.deploy.cli import main\n"
        f"sys.exit(main(['doctor', {str(experiment)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "cannot be read" in done.stdout
    assert "ok    python" in done.stdout


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (2048, "2.0 kB"), (300 * 2**20, "300 MB"), (5.5 * 2**40, "5632 GB")]
)
def test_sizes_for_people(size: float, text: str) -> None:
    assert size_text(size) == text


def test_a_missing_sandbox_is_a_note_that_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = sandbox_check()
    assert (found.name, found.status) == ("sandbox", "note")
    assert "apt-get install" in found.found


def test_doctor_advertises_no_extra_that_no_code_uses() -> None:
    """Code imports a package of it, or looks for its module by name."""
    package = Path(asyncrl.__file__).parent
    folders = [package, *(package.parent / name for name in ("services", "protocols", "deploy", "bench"))]
    code = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    used = set(re.findall(r"""(?:import |from |["'])(\w+)""", code))
    named = {"opentelemetry-proto": "opentelemetry", "cupy-cuda12x": "cupy", "cupy-cuda13x": "cupy", "pillow": "PIL"}
    for extra, packages in requirements().items():
        modules = {named.get(name, name.replace("-", "_")) for name in packages}
        assert modules & used, f"no code uses the extra {extra}"


BOTH = {"nvidia-nccl-cu12": "2.32.3", "nvidia-nccl-cu13": "2.30.7"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_wheels_of_nccl_are_refused_by_name_and_with_what_to_do(device: str) -> None:
    (problem,) = gpu_package_problems({"training.device": device}, BOTH.get)
    assert problem.is_warning == (device == "cpu")
    golden.says(problem, "[cu12]", "[cu13]", *BOTH.values())


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
