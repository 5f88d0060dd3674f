"""What a run begins with."""

import errno
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.api import _reward_here
from asyncrl.config.schema import Config, RewardConfig
from asyncrl.config.sources import read
from asyncrl.controller.journal.checkpoints import ResumePlan
from asyncrl.controller.journal.journal import Scan
from asyncrl.controller.journal.ledger import Drawn, Generated, Ledger, Scored
from asyncrl.controller.journal.run_storage import FileStore, MemoryStore
from asyncrl.deploy import run_setup
from asyncrl.deploy.checks.run_prompts import read_prompts
from asyncrl.deploy.process.interrupts import StopSignals
from asyncrl.deploy.run_fleet import RunRequest, facts_of
from asyncrl.deploy.run_setup import (
    exhausted,
    nothing_left,
    restore_run,
    settle_config,
)
from asyncrl.errors import (
    AlgorithmError,
    ArenaFull,
    AsyncrlError,
    ConfigError,
    DeadlineExceeded,
    FleetFailed,
    Interrupted,
    JournalError,
    NonFiniteLoss,
    OnlyTruncated,
    PeerLost,
    PolicyMismatch,
    RemoteError,
    RewardError,
    TaskError,
    TrainedTwice,
    TrainingStopped,
    UnknownEndpoint,
    WeightsError,
    WireError,
)
from asyncrl.tasks import training_prompts
from asyncrl.tasks.source_problems import check_rows
from asyncrl.telemetry.display import open_display
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.logs import WarningFile
from asyncrl.telemetry.run_directory import RunDirectory, open_run_directory


def constant(sample: object, value: float) -> float:
    return value


ROWS = [{"prompt": "x" * length} for length in (1, 2, 3)]


def order(path: Path, **sections: Any) -> RunRequest:
    values = {"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **sections}
    return RunRequest(Config.model_validate(values), path, open_display(1), "asyncrl run", prompts=ROWS)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return open_run_directory(tmp_path)


@pytest.fixture
def store(directory: RunDirectory) -> Iterator[FileStore]:
    with closing(FileStore(directory.path)) as store:
        yield store


@pytest.mark.parametrize(
    ("then", "kept"), [({}, True), ({"steps": 3}, True), ({"seed": 3}, False), ({"model": {"name": "other"}}, False)]
)
def test_a_model_made_for_a_start_that_came_to_nothing_is_used_only_by_its_own_config(
    then: dict[str, Any], kept: bool, directory: RunDirectory
) -> None:
    settle_config(order(directory.path, **then), directory, None)
    directory.model.mkdir()
    settle_config(order(directory.path), directory, None)
    assert directory.model.exists() == kept


@pytest.mark.parametrize(
    ("there", "sections", "made"),
    [
        ({"checkpoints/0/"}, {}, True),
        ({"checkpoints/0/"}, {"seed": 3}, False),
        ({"checkpoints/0/"}, {"model": {"name": "other"}}, False),
        ({"checkpoints/0/", "checkpoints/4/"}, {}, False),
        ({"checkpoints/0/", "model/config.json", "model/model.safetensors"}, {}, False),
        (set(), {}, False),
    ],
)
async def test_a_model_that_the_only_checkpoint_links_to_is_prepared_again_where_it_is_gone(
    there: set[str],
    sections: dict[str, Any],
    made: bool,
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Planned(ConfigError):
        pass

    prepared: list[Path] = []

    async def prepare(config: Config, target: Path, show: object) -> Path:
        prepared.append(target)
        return target

    def plan(store: FileStore) -> ResumePlan:
        raise Planned

    settle_config(order(directory.path), directory, None)
    for name in there:
        path = directory.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text("{}")
    monkeypatch.setattr(run_setup, "prepare", prepare)
    monkeypatch.setattr(run_setup, "plan_resume", plan)
    monkeypatch.setattr(run_setup, "_check", lambda request: [])
    with pytest.raises(Planned):
        await run_setup.run(order(directory.path, **sections))
    assert prepared == ([directory.model] if made else [])


def test_a_config_that_cannot_be_written_stays_as_it_is(directory: RunDirectory) -> None:
    settle_config(order(directory.path), directory, None)
    before = directory.config.read_text()
    directory.config.with_name("config.toml.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        settle_config(order(directory.path, steps=7), directory, None)
    assert directory.config.read_text() == before


def test_a_change_of_what_a_reward_imports_is_refused_until_it_is_accepted(
    directory: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "reward.py"
    helper = tmp_path / "helpers.py"
    reward.write_text("from helpers import right\n")
    helper.write_text("def right(sample): return 1.0\n")
    named = {"task": {"prompts": f"{tmp_path}/p.jsonl"}, "reward": {"functions": [f"{reward}:right"]}}
    request = order(directory.path, **named, steps=6)
    settle_config(request, directory, None)
    settle_config(request, directory, PLAN)
    helper.write_text("def right(sample): return 2.0\n")
    said = rf"reward\.functions: {helper} has changed \(SHA-256 .* is what it was"
    with pytest.raises(ConfigError, match=said):
        settle_config(request, directory, PLAN)
    settle_config(replace(request, accept_changes=True), directory, PLAN)
    assert re.search(f"changed: {said}", capsys.readouterr().out)
    assert len(list(directory.sources.glob("*-helpers.py"))) == 2
    shutil.rmtree(directory.sources)
    for gone in (True, False):
        settle_config(request, directory, PLAN)
        warning = f"warning: {directory.sources}/index.json is gone: changes of prompts and code go unseen"
        assert (warning in capsys.readouterr().out) == gone


MADE = """
def whole(size):
    return [{"prompt": "p", "tests": ["assert f(1)"]}] * 2

def half(size):
    yield from whole(size)
    yield {"prompt": "q", "answer": "a"}

class Endless:
    def __len__(self):
        return 10**9
    def __getitem__(self, number):
        assert number < 10_000, "only the first rows are read before the run starts"
        return whole(1)[0]

def endless(size):
    return Endless()
"""


@pytest.mark.parametrize(
    ("sections", "source"),
    [
        ({"task": {"prompts": "{mine}:half"}}, "task.prompts: {mine}:half"),
        (
            {"task": {"prompts": "{mine}:whole"}, "evaluate": {"prompts": "{mine}:half"}},
            "evaluate.prompts: {mine}:half",
        ),
    ],
)
def test_rows_that_a_function_made_without_tests_are_refused_before_workers_start(
    sections: dict[str, Any], source: str, directory: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MADE)
    mine = str(tmp_path / "mine.py")
    named = {name: {"prompts": each["prompts"].format(mine=mine)} for name, each in sections.items()}
    request = replace(order(tmp_path, **named, reward={"functions": ["passes_tests"]}), prompts=None)
    with pytest.raises(TaskError) as refused:
        read_prompts(request.config, request.prompts)
    missing = "row 3: the row has no column tests with tests; found are prompt, answer"
    assert str(refused.value) == f"{source.format(mine=mine)}, {missing}"
    read_prompts(order(tmp_path, **named).config)


def test_of_many_rows_made_on_demand_only_the_first_are_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MADE)
    config = order(tmp_path, task={"prompts": f"{tmp_path}/mine.py:endless"}, reward={"functions": ["passes_tests"]})
    check_rows(config.config, {"task.prompts": training_prompts(config.config)})


PLAN = ResumePlan(1, 5, 0, "checkpoints/5", Ledger(), 5, ("checkpoint 6 was passed over",), Scan(MemoryStore()))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (5, "already done at step 5; nothing to do (raise steps to go on)"),
        (3, "already done at step 5, beyond the 3 asked for; nothing to do (raise steps to go on)"),
    ],
)
def test_a_run_that_is_done_says_so(
    directory: RunDirectory, steps: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nothing_left(order(directory.path, steps=steps), directory, PLAN)
    assert capsys.readouterr().out.split("\n")[:2] == [*PLAN.said, said]


def test_a_run_that_is_done_refuses_what_changed(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    def asked(**keys: object) -> RunRequest:
        return order(directory.path, steps=5, **keys)

    settle_config(asked(), directory, None)
    with pytest.raises(ConfigError, match=r"seed"):
        nothing_left(asked(seed=1), directory, PLAN)
    assert nothing_left(replace(asked(seed=1), accept_changes=True), directory, PLAN)
    assert "changed, for further steps: seed" in capsys.readouterr().out


Ended = Callable[..., Awaitable[None]]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """ended(train, versions=(), **request): runs with this in place of checks, training and report. versions: of the
    run's checkpoints."""

    async def report(*_: object) -> None:
        return None

    monkeypatch.setattr(run_setup, "_check", lambda request: [])
    monkeypatch.setattr(run_setup, "report_run", report)

    async def run(train: Any, versions: Sequence[int] = (), **changes: Any) -> None:
        monkeypatch.setattr(run_setup, "_train", train)
        monkeypatch.setattr(run_setup, "versions", lambda store: [*versions])
        await run_setup.run(replace(order(tmp_path, steps=5), **changes))

    return run


def reaching(version: int, act: Callable[..., None] = lambda *given: None) -> Any:
    """Returns a training that ends with this version and one warning. act: what it does besides with its arguments."""

    async def train(request: RunRequest, directory: RunDirectory, *given: Any) -> None:
        directory.metrics.write_text(json.dumps({"step": version, "version": version}) + "\n")
        WarningFile(directory.warnings, request.display.say, lambda: 3).warn("guards.truncation: 70% were cut off")
        act(request, directory, *given)

    return train


def raising(error: BaseException) -> Any:
    async def train(*_: object) -> None:
        raise error

    return train


def noted(folder: Path, event: str, field: str) -> list[str]:
    return [line[field] for line in read_lines(folder / "logs" / "controller.jsonl") if line["event"] == event]


WARNED = "warned: guards.truncation (once, after step 3): 70% were cut off"


@pytest.mark.parametrize(
    ("version", "first", "last"),
    [(5, "done; next: ", WARNED), (3, WARNED, "stopped at step 3 of 5; go on with: asyncrl run")],
)
async def test_warnings_stand_again_below_done_and_nothing_below_the_command_that_resumes(
    version: int, first: str, last: str, ended: Ended, tmp_path: Path
) -> None:
    await ended(reaching(version))
    *_, before, closing_line = noted(tmp_path, "said", "text")
    assert before.startswith(first)
    assert closing_line == last


async def test_how_a_run_ended_is_in_its_log(ended: Ended, tmp_path: Path) -> None:
    with pytest.raises(FleetFailed):
        await ended(raising(FleetFailed("the trainer died")))
    assert noted(tmp_path, "run ends", "error") == ["FleetFailed: the trainer died. Resume with: asyncrl run"]


@pytest.mark.parametrize(("written", "shown"), [({}, "2026-12-01"), ({"date": "2024-02-29"}, "2024-02-29")])
async def test_prompts_have_one_date_on_whatever_day_a_run_goes_on(
    ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: dict[str, str], shown: str
) -> None:
    dates: list[str] = []

    def settle(request: RunRequest, directory: RunDirectory, *_: object) -> None:
        settle_config(request, directory, None)
        dates.append(request.config.task.date)

    request = order(tmp_path, task={"prompts": "p.jsonl", **written})
    for number in (1, 2, 3):
        monkeypatch.setattr(run_setup, "date", SimpleNamespace(today=lambda number=number: date(2026, 12, number)))
        await ended(reaching(3, settle), config=request.config)
        assert read(tmp_path / "config.toml").task.date == dates[-1]
    assert dates == [shown] * 3


@pytest.mark.parametrize("reward", [lambda sample: 0.5, partial(constant, value=0.5)])
async def test_a_reward_of_this_process_that_tells_no_answers_apart_ends_the_run_before_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: Any
) -> None:
    async def prepare(*_: object) -> None:
        raise AssertionError("no model is needed")

    monkeypatch.setattr(run_setup, "_check", lambda request: [])
    monkeypatch.setattr(run_setup, "prepare", prepare)
    services = _reward_here([reward], RewardConfig(), lambda line: None)
    with pytest.raises(TaskError, match=r"reward\.functions: .* both have 0\.5, .*nothing can be learnt"):
        await run_setup.run(replace(order(tmp_path), prompts=[{"prompt": "2 + 2?", "answer": "4"}], services=services))


@pytest.mark.parametrize(("is_asked", "seconds"), [(False, 20.0), (True, 5.0)])
async def test_an_ended_run_waits_for_its_report_a_moment_and_less_after_a_signal(
    is_asked: bool, seconds: float, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*given: Any) -> None:
        (signals,) = (each for each in given if isinstance(each, StopSignals))
        with signals.ending_in_order(lambda: None):
            signals.end_in_order()

    async def report(run_dir: Path, say: Any, deadline: float) -> None:
        waited.append(deadline)

    waited: list[float] = []
    monkeypatch.setattr(run_setup, "report_run", report)
    await ended(reaching(3, end) if is_asked else reaching(3))
    assert waited == [seconds]


REMOTE = RemoteError("RuntimeError", "CUDA error", "training0", 1, "")


KINDS = (WeightsError, ArenaFull, WireError, DeadlineExceeded, PeerLost, FleetFailed, TaskError, RewardError)
KINDS += (AlgorithmError, ConfigError, NonFiniteLoss, OnlyTruncated, PolicyMismatch, TrainingStopped, JournalError)
KINDS += (TrainedTwice, UnknownEndpoint, KeyError, ZeroDivisionError, MemoryError, Interrupted)
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error",
    [REMOTE, FULL, OSError(errno.EIO, "Input/output error"), *(kind("it says why") for kind in KINDS)],
    ids=lambda error: type(error).__name__,
)
async def test_every_end_of_a_run_with_a_checkpoint_names_the_command_that_resumes(
    error: Exception, ended: Ended
) -> None:
    """But an interrupt, which has said it already."""
    with pytest.raises(AsyncrlError) as caught:
        await ended(raising(error), [5])
    resumes = not isinstance(error, Interrupted)
    assert caught.value.exit_code == (75 if resumes else 130)
    assert str(error) in str(caught.value)
    assert str(caught.value).endswith("Resume with: asyncrl run") == resumes


async def test_a_program_that_calls_gets_the_error_of_its_own_code(
    ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError, match="rewards") as caught:
        await ended(raising(KeyError("rewards")), [5], is_call=True)
    assert caught.value.__notes__ == ["Resume with: asyncrl run"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "resumes"),
    [
        (ConfigError("steps is no number"), 2, False),
        (TaskError("row 3 has no prompt"), 2, True),
        (JournalError("start it anew with another --run-dir"), 1, False),
    ],
)
async def test_what_refuses_a_start_before_workers_are_started_ends_no_run(
    error: AsyncrlError, code: int, resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def anything(*_: object) -> None:
        return None

    def settle(*_: object) -> None:
        raise error

    monkeypatch.setattr(run_setup, "_check", lambda request: [])
    monkeypatch.setattr(run_setup, "settle_config", settle)
    monkeypatch.setattr(run_setup, "versions", lambda store: [5])
    monkeypatch.setattr(run_setup, "plan_resume", lambda store: None)
    monkeypatch.setattr(run_setup, "_prepare_again", anything)
    with pytest.raises(type(error)) as caught:
        await run_setup.run(order(tmp_path, steps=5))
    assert caught.value.exit_code == code
    assert str(caught.value).endswith("Resume with: asyncrl run") == resumes


@pytest.mark.parametrize(
    "error", [RewardError("it raised KeyError"), TaskError("row 3"), ConfigError("no bubblewrap"), REMOTE]
)
async def test_an_error_before_the_first_checkpoint_stays_what_it_is(error: AsyncrlError, ended: Ended) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))) as caught:
        await ended(raising(error))
    assert caught.value.exit_code == type(error).exit_code


def test_a_run_that_is_not_done_or_whose_last_version_was_not_evaluated_goes_on(directory: RunDirectory) -> None:
    assert not nothing_left(order(directory.path, steps=5), directory, None)
    assert not nothing_left(order(directory.path, steps=6), directory, PLAN)
    asked = order(directory.path, steps=5, evaluate={"prompts": "held_out.jsonl"})
    directory.evaluations.write_text('{"version": 4}\n')
    assert not nothing_left(asked, directory, PLAN)
    directory.evaluations.write_text('{"version": 5}\n')
    assert nothing_left(asked, directory, PLAN)


@pytest.mark.parametrize(("wire", "beats"), [("tcp", True), ("ipc", False), ("inproc", False)])
def test_links_between_hosts_have_heartbeats(
    wire: str, beats: bool, directory: RunDirectory, store: FileStore, tmp_path: Path
) -> None:
    config = order(tmp_path, fleet={"wire": wire}).config
    facts = facts_of(config, directory, tmp_path / "model", restore_run(config, directory, store, None))
    assert (facts.heartbeat is not None) == beats


def remote(message: str) -> RemoteError:
    return RemoteError("SafetensorError", message, "training", 0, "")


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (FULL, "the disk is full: [Errno 28] No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up: [Errno 122] Disk quota exceeded"),
        (remote("I/O error: No space left on device (os error 28)"), "the disk is full: training[0] raised Safet"),
        (remote("Disk quota exceeded (os error 122)"), "the disk quota is used up: training[0]"),
        (remote("[Errno 28] No space left on device: 'trainer.pt'"), "the disk is full: training[0]"),
        (OSError(errno.ENOENT, "no such file"), ""),
        (remote("[Errno 2] no such file"), ""),
        (remote("28"), ""),
        (ConfigError("no"), ""),
    ],
)
def test_what_ran_out(error: Exception, what: str) -> None:
    found = exhausted(error)
    assert (found is not None, (found or "").startswith(what)) == (bool(what), True)


def waiting_plan() -> ResumePlan:
    """Returns a plan whose ledger has a group that waits for training, and one of which one sample does."""
    ledger = Ledger()
    for group in range(2):
        ledger.apply(Drawn(group, 0, 2))
        ledger.apply(Generated(group, 0, ((0, 0, 0, 3), (1, 0, 0, 3))))
    for key in ((0, 0), (0, 1), (1, 0)):
        ledger.apply(Scored(*key, 1.0))
    return ResumePlan(1, 0, 0, "checkpoints/0", ledger, 0, (), Scan(MemoryStore()), ((0, (0, 1)), (1, (0,))))


@pytest.mark.parametrize(
    ("sections", "accept", "restored", "said"),
    [
        ({}, False, ((0, (0, 1)), (1, (0,))), "3 wait for training as they are, 1 are sampled again"),
        ({"steps": 9}, False, ((0, (0, 1)), (1, (0,))), "3 wait for training as they are, 1 are sampled again"),
        ({}, True, ((0, (0, 1)), (1, (0,))), "3 wait for training as they are, 1 are sampled again"),
        ({"steps": 9}, True, (), "0 wait for training as they are, 4 are sampled again"),
    ],
)
def test_a_resume_restores_what_waited_for_training_unless_a_change_was_accepted(
    directory: RunDirectory,
    sections: dict[str, Any],
    accept: bool,
    restored: Any,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = {"prompts": str(directory.path / "p.jsonl")}
    settle_config(order(directory.path, task=task), directory, None)
    request = replace(order(directory.path, task=task, **sections), accept_changes=accept)
    assert settle_config(request, directory, waiting_plan()).waiting == restored
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("accept", [False, True])
def test_episodes_go_on_after_a_resume_unless_changes_were_accepted(
    directory: RunDirectory, accept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"prompts": str(directory.path / "p.jsonl")}
    settle_config(order(directory.path, task=task), directory, None)
    changes = {"training": {"learning_rate": 0.5}} if accept else {}
    request = replace(order(directory.path, task=task, **changes), accept_changes=accept)
    found = settle_config(request, directory, replace(waiting_plan(), answered=((1, 1, 0),)))
    assert found.answered == (() if accept else ((1, 1, 0),))
    said = " ".join(capsys.readouterr().out.split())
    assert ("1 episodes go on after their last turn, 0 are sampled again" in said) is not accept


def test_where_a_function_scores_whole_groups_only_whole_groups_are_restored(directory: RunDirectory) -> None:
    reward = {"functions": [{"use": "length", "group": True}]}
    request = order(directory.path, reward=reward, task={"prompts": str(directory.path / "p.jsonl")})
    settle_config(request, directory, None)
    assert settle_config(request, directory, waiting_plan()).waiting == ((0, (0, 1)),)
