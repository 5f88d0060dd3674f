"""An algorithm of the user's own: how it is found, what is refused before the start, and how its failures are told."""

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncrl import algorithms
from asyncrl.algorithms import grpo, remax
from asyncrl.algorithms.algorithm_by_name import (
    FROM_PYTHON,
    algorithm_from,
    algorithm_named,
    algorithm_of,
    importable_algorithm,
)
from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm_config import AlgorithmConfig
from asyncrl.config.sections.task_config import ActingConfig
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.journal.ledger import AttemptStarted, Dropped
from asyncrl.controller.rollouts import Attempt
from asyncrl.errors import AlgorithmError, ConfigError, PeerLost
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef
from asyncrl.simulation.fakes.scoring import FakeReward
from tests import golden
from tests.unit.algorithms.own import OWN, line_of, played, roll_out, train
from tests.unit.scene import CONFIG, Scene


class Methods:
    def __init__(self) -> None:
        self.called = 0

    async def roll_out(self, fleet: Fleet, control: Controller, group: Attempt) -> None:
        self.called += 1
        await grpo.roll_out(fleet, control, group)

    async def train(self, fleet: Fleet, control: Controller) -> None:
        await grpo.train(fleet, control)


def test_an_algorithm_is_an_algorithm_a_module_or_an_object_with_both_functions() -> None:
    assert algorithm_from(OWN, "p") is OWN
    assert algorithm_from(grpo, "p").roll_out is grpo.roll_out
    scene = Scene()
    methods = Methods()
    scene.algorithm = algorithm_from(methods, "p")
    scene.play()
    assert methods.called > 0
    assert scene.gate.version == 3


async def yields(fleet: Fleet, control: Controller) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            SimpleNamespace(train=train),
            r"it has no function roll_out, write `async def roll_out\(fleet, control, group\)`",
        ),
        (SimpleNamespace(roll_out=roll_out), r"it has no function train, write `async def train\(fleet, control\)`"),
        (Algorithm(roll_out, lambda fleet, gate: None), "its train is not async, write"),  # type: ignore[arg-type, return-value]
        (Algorithm(roll_out, yields), "its train yields, write"),
        (
            Algorithm(train, train),
            r"its roll_out takes \(fleet, control\) and is called with \(fleet, control, group\), write",
        ),  # type: ignore[arg-type]
        (7, "roll_out, .*; it has no function train"),
        (
            lambda fleet, gate: None,
            r"it is one function, and an algorithm has two, write `asyncrl\.Algorithm\(roll_out, train\)`$",
        ),
        (Methods, r"it is a class, give an instance, write `Methods\(\.\.\.\)`$"),
    ],
)
def test_what_is_no_algorithm_is_refused_with_what_to_write(given: object, says: str) -> None:
    with golden.raises(ConfigError, match=r"algorithm\.custom = x") as caught:
        algorithm_from(given, "algorithm.custom = x")
    assert re.search(says, str(caught.value))


def test_what_has_a_name_is_recorded_by_it() -> None:
    assert importable_algorithm(grpo.ALGORITHM) == "asyncrl.algorithms.grpo:ALGORITHM"
    assert importable_algorithm(grpo) == "asyncrl.algorithms.grpo"
    assert algorithm_named("asyncrl.algorithms.grpo:ALGORITHM") is grpo.ALGORITHM
    assert algorithm_named("asyncrl.algorithms.grpo").train is grpo.train
    assert importable_algorithm(Algorithm(grpo.roll_out, grpo.train)) is None, "nothing there is this very algorithm"
    assert importable_algorithm(Methods()) is None
    assert importable_algorithm(ModuleType("made_up")) is None


def test_what_a_script_or_a_notebook_defines_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def of_script(fleet: Fleet, control: Controller, group: Attempt) -> None:
        return

    of_script.__module__ = "__main__"
    algorithm = Algorithm(of_script, train)
    monkeypatch.setattr(sys.modules["__main__"], "ALGORITHM", algorithm, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", sys.modules[__name__].__spec__)  # as of `python -m`
    assert importable_algorithm(algorithm) is None
    assert importable_algorithm(sys.modules["__main__"]) is None


def test_a_file_of_an_algorithm_is_found_by_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from asyncrl import Algorithm\nfrom asyncrl.algorithms.grpo import roll_out, train\nOURS = "
        "Algorithm(roll_out, train)\n"
    )
    (tmp_path / "own_pages.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_pages:OURS", "own_pages", "own_pages.py:OURS", "own_pages.py"):
        assert algorithm_named(name).roll_out is grpo.roll_out, name
    config = {"model": {"name": "m"}, "task": {"prompts": "p"}, "algorithm": {"custom": "own_pages:OURS"}}
    assert algorithm_of(Config.model_validate(config)) is not grpo.ALGORITHM


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:ALGORITHM", r"algorithm\.custom.*nowhere\.py"),
        ("asyncrl.algorithms.grop:ALGORITHM", ""),
        ("asyncrl.algorithms.grpo:ALGORITHMS", "ALGORITHMS.*mean ALGORITHM"),
        ("asyncrl.config.problems", "roll_out"),
        (FROM_PYTHON, ""),
    ],
)
def test_a_name_that_leads_to_no_algorithm_is_refused(name: str, says: str) -> None:
    with golden.raises(ConfigError, match=says):
        algorithm_named(name)


# ---- failures ------------------------------------------------------------------------------------------------


async def raising(fleet: Fleet, control: Controller, group: Attempt) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(grpo.roll_out(fleet, control, group))
        if group.prompts.id == 1:
            raise KeyError("mine")


def test_what_an_algorithm_raises_is_told_with_its_line() -> None:
    with pytest.raises(AlgorithmError) as caught:
        played(roll_out=raising)
    where = f"{__file__}, line {line_of(raising, 'raise KeyError')}"
    assert str(caught.value) == f"roll_out of algorithms:MINE raised KeyError: 'mine' ({where})"
    assert isinstance(caught.value.__cause__, KeyError)


async def losing(fleet: Fleet, control: Controller, group: Attempt) -> None:
    if group.prompts.attempt == 0:
        raise PeerLost("generation0.0 died")
    await grpo.roll_out(fleet, control, group)


def test_a_lost_worker_is_no_fault_of_the_algorithm() -> None:
    scene = played(roll_out=losing)
    assert scene.gate.version == 3
    assert {failed.reason for failed in scene.told(AttemptStarted)} == {"generation0.0 died"}


async def never_generated(fleet: Fleet, control: Controller, group: Attempt) -> None:
    async for _ in fleet.generation.generate(group.prompts):
        pass


async def never_ready(fleet: Fleet, control: Controller, group: Attempt) -> None:
    async for samples in fleet.generation.generate(group.prompts):
        control.generated(samples)


async def stops_early(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            control.trained(await fleet.training.step(cuts))
        break


async def never_iterates(fleet: Fleet, control: Controller) -> None:
    return


async def never_trained(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            await fleet.training.step(cuts)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"roll_out": never_generated}, "0, 1, 2, 3.*0"),
        ({"roll_out": never_ready}, "0, 1, 2, 3.*0"),
        ({"train": stops_early}, "algorithms:MINE.*version 1"),
        ({"train": never_iterates}, "algorithms:MINE.*version 0"),
        ({"train": never_trained}, r"algorithms:MINE.*control\.trained\(report\)"),
    ],
)
def test_what_an_algorithm_leaves_undone_ends_the_run_instead_of_stalling_it(changed: Any, says: str) -> None:
    with golden.raises(AlgorithmError, match=says):
        played(**changed)


def test_an_algorithm_that_forgets_the_greedy_answer_its_advantage_needs_is_told_so() -> None:
    scene = Scene(replace(CONFIG, greedy=True, baseline=1))
    scene.algorithm = OWN
    with golden.raises(AlgorithmError):
        scene.play()
    scene = Scene(replace(CONFIG, greedy=True, baseline=1))
    scene.algorithm = replace(remax.ALGORITHM, name="algorithms:MINE")
    scene.play()
    assert scene.gate.version == 3


def test_a_late_drop_touches_no_later_attempt() -> None:
    kept: list[BatchRef] = []

    async def drops_late(fleet: Fleet, control: Controller, group: Attempt) -> None:
        async for samples in fleet.generation.generate(group.prompts):
            control.generated(samples)
            kept.append(samples)
            if group.prompts.id == 0 and group.prompts.attempt == 0:
                raise PeerLost("generation0.0 died")
            if kept[0] is not samples:
                control.drop(kept[0], "too late")
            control.ready(samples, await fleet.reward.score(samples, group.row))

    scene = played(roll_out=drops_late)
    assert not scene.told(Dropped)


async def best(fleet: Fleet, control: Controller, group: Attempt) -> None:
    async for samples in fleet.generation.generate(group.prompts):
        control.generated(samples)
        scores = await fleet.reward.score(samples, group.row)
        control.drop(samples.take([0]), "not wanted")
        control.drop(samples.take([0]), "not wanted")
        control.ready(samples.take(range(1, len(samples))), scores[1:])


def test_an_algorithm_may_drop_samples_with_a_reason_of_its_own() -> None:
    scene = played(roll_out=best)
    dropped = [event for event in scene.told(Dropped) if event.reason == "not wanted"]
    assert dropped
    assert {len(event.members) for event in dropped} == {1}
    assert scene.journal.ledger.dropped["not wanted"] == len(dropped), "once each"
    assert scene.gate.version == 3


async def waits(fleet: Fleet, control: Controller, group: Attempt) -> None:
    async for samples in fleet.generation.generate(group.prompts):
        control.generated(samples)
    await asyncio.sleep(100_000)


async def waits_for_a_service(fleet: Fleet, control: Controller, group: Attempt) -> None:
    async for samples in fleet.generation.generate(group.prompts):
        control.generated(samples)
    await fleet.reward.score(samples, {})  # takes 100_000 seconds


@pytest.mark.parametrize(("algorithm", "text"), [(waits, "sleep(100_000)"), (waits_for_a_service, "takes 100_000")])
def test_an_algorithm_that_waits_is_described_with_its_line(algorithm: Any, text: str) -> None:
    scene = Scene()
    scene.reward = FakeReward(100_000)
    scene.algorithm = replace(OWN, roll_out=algorithm)
    said: list[str] = []

    async def train_then_ask(fleet: Fleet, control: Controller) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask())
            await grpo.train(fleet, control)

    async def ask() -> None:
        await asyncio.sleep(50.0)
        said.extend(scene.controller.describe_waits())
        scene.controller.stop()

    scene.algorithm = replace(scene.algorithm, train=train_then_ask)
    scene.play()
    assert said[0] == "the algorithm, at version 0: samples 0 running, 16 scoring, 0 ready, 0 training"
    place = f"{__file__}, line {line_of(algorithm, text)}"
    assert said[1] == f"  roll_out of group 0 has not ended for members (0, 1, 2, 3); waits in {place}"
    golden.says(said[2])
    assert "grpo.py, line" in said[2]


def test_a_preset_with_a_file_of_its_name_runs_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(remax.__file__)).read_text()
    (tmp_path / "raft.py").write_text(text)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    grpo_keys = AlgorithmConfig()
    chosen = Config.model_construct(algorithm=grpo_keys.model_copy(update={"preset": "raft"}), acting=ActingConfig())
    assert algorithm_of(chosen).train.__module__ == "asyncrl.algorithms.raft"
    assert algorithm_of(Config.model_construct(algorithm=grpo_keys, acting=ActingConfig())) is grpo.ALGORITHM
