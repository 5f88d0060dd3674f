"""The house rules that a machine can hold: layout, the budget of lines, imports, forbidden constructs."""

import ast
import importlib
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOUNTED = ("services", "protocols", "deploy", "bench")
SOURCE_FOLDERS = ("asyncrl", *MOUNTED)

# Where code of others runs, or a failure becomes an answer; each broad except there says why.
SUPERVISED_BOUNDARY = {
    "asyncrl/children/child_messages.py",
    "asyncrl/children/sandbox/inside/program_server.py",
    "asyncrl/engines/acting/stepping/environment_server.py",
    "asyncrl/engines/acting/stepping/one_environment.py",
    "asyncrl/engines/acting/stepping/picture_server.py",
    "asyncrl/children/sandbox/inside/examiner.py",
    "asyncrl/children/sandbox/inside/first_process.py",
    "asyncrl/children/sandbox/inside/package_server.py",
    "asyncrl/controller/iterations.py",
    "deploy/run_setup.py",
    "asyncrl/simulation/faults/simulate_command.py",
    "asyncrl/environments/tools/tool_environment.py",
    "asyncrl/fleet/worker/service.py",
    "asyncrl/lanes/control/server.py",
    "asyncrl/environments/episode.py",
    "asyncrl/lanes/weights/transports/communicator.py",
    "asyncrl/rewards/execution/function_call.py",
    "asyncrl/tasks/prompt_sources.py",
    "asyncrl/telemetry/sinks.py",
}
IMPURE = {
    *("checkpointing.py", "training_run.py", "observers/inspection.py", "observers/progress.py"),
    *("observers/recorder.py", "journal/run_copy.py", "journal/run_storage.py"),
}
"""Modules of the controller that read a clock or do I/O. All others, the supervisor and the control lane are replayed
by the virtual loop."""
FORBIDDEN_IN_PURE = {"time", "random", "uuid", "threading", "secrets", "torch"}


def tracked() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout
    return [path for name in listed.splitlines() if (path := ROOT / name).is_file()]


def python_files(*folders: str) -> list[Path]:
    wanted = folders or (*SOURCE_FOLDERS, "tests")
    return [p for p in tracked() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in wanted]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_no_room_exceeds_its_budget() -> None:
    budget = tomllib.loads((ROOT / "tests/house/budget.toml").read_text())
    lines: Counter[str] = Counter()
    for path in python_files():
        parts = path.relative_to(ROOT).parts
        room = parts[1] if parts[0] == "asyncrl" and len(parts) > 2 else parts[0]
        lines[room] += len(path.read_text().splitlines())
    assert set(lines) == set(budget)
    over = {room: f"{count} of {budget[room]}" for room, count in lines.items() if count > budget[room]}
    assert not over, "make it smaller, or raise the room's budget in tests/house/budget.toml and say what for"


@pytest.mark.parametrize("name", MOUNTED)
def test_top_level_folders_are_real_and_mounted_by_links(name: str) -> None:
    assert (ROOT / name).is_dir()
    assert not (ROOT / name).is_symlink()
    assert (ROOT / "asyncrl" / name).readlink() == Path("..") / name
    assert importlib.import_module(f"asyncrl.{name}")


@pytest.mark.parametrize("name", MOUNTED)
def test_a_mounted_package_refuses_its_bare_name(name: str) -> None:
    python = [str(ROOT / ".venv/bin/python"), "-c", f"import {name}"]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert f"import asyncrl.{name}, not {name}" in done.stderr


def impurities(path: Path) -> Iterator[str]:
    """Yields what a module has that differs from run to run."""
    yield from (name for name in imports(path) if name.split(".")[0] in FORBIDDEN_IN_PURE)
    for node in ast.walk(ast.parse(path.read_text())):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called in {"open", "asyncio.to_thread"} or called.startswith(("time.", "random.")):
            yield called
        if isinstance(node, ast.For | ast.comprehension) and iterates_a_set(node.iter):
            yield f"iterates {ast.unparse(node.iter)}"


def test_pure_modules_use_no_clock_no_randomness_and_no_thread() -> None:
    controller = ROOT / "asyncrl/controller"
    found = {str(path.relative_to(controller)): [*impurities(path)] for path in controller.rglob("*.py")}
    assert {name: why for name, why in found.items() if why and name not in IMPURE} == {}
    others = [*(ROOT / "asyncrl/lanes/control").rglob("*.py"), ROOT / "asyncrl/fleet/supervisor.py"]
    assert {path.name for path in others if [*impurities(path)]} == {"peer_guard.py"}


def iterates_a_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {"set", "frozenset"}


def test_broad_excepts_only_at_the_supervised_boundary() -> None:
    broad = {str(path.relative_to(ROOT)): broad_excepts(path) for path in python_files(*SOURCE_FOLDERS)}
    found = [f"{name}:{lines}" for name, lines in broad.items() if lines and name not in SUPERVISED_BOUNDARY]
    assert not found, "handle the errors you expect, let the others pass"
    assert not [name for name in SUPERVISED_BOUNDARY if not broad.get(name)], "it is narrow now: take it off the list"


@pytest.mark.parametrize("name", sorted(SUPERVISED_BOUNDARY))
def test_every_broad_except_has_a_comment(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert not [number for number in broad_excepts(ROOT / name) if "  # " not in lines[number - 1]]


def broad_excepts(path: Path) -> list[int]:
    """Their line numbers."""
    handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
    caught = {node.lineno: ast.unparse(node.type) if node.type else "BaseException" for node in handlers}
    return [line for line, names in caught.items() if re.search(r"\b(Base)?Exception\b", names)]


def test_source_has_no_pickle_and_no_unfinished_marks() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "import pick" + "le", "NotImplemented" + "Error: later")
    found = [f"{p.relative_to(ROOT)}: {w}" for p in python_files() for w in words if w in p.read_text()]
    assert not found


def test_no_path_of_this_machine_is_committed() -> None:
    words = ("/work" + "/", "/opt" + "/wheels", "/opt" + "/pypi", "." + "library")
    texts = [p for p in tracked() if p.suffix in {".py", ".md", ".toml", ".txt", ".yml", ""} and p.name != "LICENSE"]
    found = [f"{p.relative_to(ROOT)}: {w}" for p in texts for w in words if w in p.read_text(errors="ignore")]
    assert not found


def test_the_package_exports_at_most_ten_names() -> None:
    package = importlib.import_module("asyncrl")
    public = [name for name in package.__all__ if not name.startswith("_")]
    assert len(public) <= 10
    assert all(getattr(package, name) is not None for name in public)


def test_marked_tests_stand_where_their_job_collects_them() -> None:
    """The jobs `fleet` and `smollm2` of scripts/test import only these, which spares them half a minute."""
    collected = [ROOT / "tests/system", ROOT / "tests/unit/engines/generation/test_smollm2.py"]
    marked = [
        path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.(fleet|slow)\b", path.read_text())
    ]
    assert marked
    assert not [path for path in marked if not any(path.is_relative_to(place) for place in collected)]


def test_ci_runs_every_job_once() -> None:
    """`scripts/check` runs what the job `house` of scripts/test runs."""
    check, tests, ci = ((ROOT / name).read_text() for name in ("scripts/check", "scripts/test", ".ci/run"))
    patterns = (
        (r'^core="(.+)"$', tests),
        (r'^jobs="\$core (.+)"$', tests),
        (r"^scripts/test (.+)$", ci),
        (r'^optional="(.+)"$', ci),
    )
    core, others, first, optional = (re.findall(pattern, text, re.MULTILINE)[0].split() for pattern, text in patterns)
    assert sorted([*first, "house"]) == sorted(core)
    assert sorted(each.partition("=")[0] for each in optional) == sorted(others)
    command = ".venv/bin/pytest -q tests/house"
    assert command in check
    assert f"job_house() {{ {command}; }}" in tests
