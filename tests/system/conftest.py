"""Fixtures that several files of system tests share."""

import asyncio
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.sources import load
from asyncrl.deploy.process.fork_client import MODULES, Forks, worker_environment
from asyncrl.engines.models.model_preparation import prepare

sys.path.insert(0, str(Path(__file__).parent))
from programs import IMPORTED, ForkedProgram

os.environ.setdefault("ASYNCRL_TELEMETRY__REPORT", "false")  # A report takes two seconds; test_start.py asks for one.
PREPARATION = 400.0
"""Seconds that making a model may take; beside three other tests on two slow cores it took over 180."""
HUNG = 1200.0
"""Seconds after which a test of a fleet is ended; it waits for a run once or a few times, each PATIENCE at most."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deals the longest tests out to the processes in which tests run side by side: each begins with some of them, so
    that they run beside tests that wait, and the last test to end is short. Gives each test of a fleet its timeout."""
    for item in items:
        if item.get_closest_marker("fleet") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(HUNG))
    processes: int = getattr(config, "workerinput", {}).get("workercount", 1)
    longest = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    items[:] = [
        item
        for process in range(processes)
        for part in (longest, others)
        for item in part[len(part) * process // processes : len(part) * (process + 1) // processes]
    ]


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the quickstart's model."""
    return model_of("quickstart", tmp_path_factory)


@pytest.fixture(scope="session")
def calculator_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the calculator's model."""
    return model_of("calculator", tmp_path_factory)


def model_of(experiment: str, folders: pytest.TempPathFactory) -> Path:
    """Returns the model of an experiment, made once for all processes in which tests run side by side."""
    own = folders.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    target = shared / f"{experiment}-model"
    with (shared / f"{experiment}-model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            asyncio.run(prepare(load(experiment).config, target, print, PREPARATION))
    return target


class _AnyTest(dict[str, str]):
    """The environment of a test; pytest's variable that names the test makes no difference."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, dict)
        return {**self, "PYTEST_CURRENT_TEST": ""} == {**other, "PYTEST_CURRENT_TEST": ""}


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Workers of all runs in this process are forked from these, so that torch is imported once for all of them, and
    so are programs."""
    with Forks(_AnyTest(worker_environment(os.environ)), (*MODULES, *IMPORTED)) as forks:
        yield forks


@pytest.fixture(scope="session")
def programs(forks: Forks) -> Iterator[None]:
    """Has programs of tests begin in forked processes."""
    ForkedProgram.forks = forks
    yield
    ForkedProgram.forks = None
