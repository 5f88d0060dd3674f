"""Training from Python, where an event loop may run already."""

import asyncio
import inspect
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import asyncrl.api
from asyncrl.algorithms import grpo
from asyncrl.api import _algorithm, _algorithm_here, _by_name, _environment, _reward, _reward_here, _section
from asyncrl.config.schema import Config, RewardConfig
from asyncrl.config.user_code import one_argument_mistake, source_problem
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.deploy.process import interrupts
from asyncrl.deploy.process.interrupts import run_here_or_beside
from asyncrl.errors import ConfigError
from asyncrl.fleet.fleet import Fleet


def functions_of(thread: int) -> set[str]:
    """Names of the functions that a thread is in."""
    frame = sys._current_frames().get(thread)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def until_it_waits(thread: int) -> None:
    """Returns once the thread has handed the work over."""
    while "wait" not in functions_of(thread):
        os.sched_yield()


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_without_a_loop_it_runs_here_and_in_no_error_of_ours() -> None:
    """The log of a run takes the error at its end, if there is one."""

    async def error() -> BaseException | None:
        return sys.exception()

    assert run_here_or_beside(double(2)) == 4
    assert run_here_or_beside(error()) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("start anew with another --run-dir", "start anew with another run_dir"),
        ("take the change over with --accept-changes", "take the change over with accept_changes=True"),
        ("name another with --run-dir.", "name another with run_dir."),
        ("starts with another --run-dir and --model.name FOLDER", 'starts with another run_dir and model="FOLDER"'),
        ("--step 3: write the number of a step, or best", "step 3: write the number of a step, or best"),
        ("name prompts with --prompts", "name prompts with prompts"),
        ("use `asyncrl run --run-dir runs/a`", "use `asyncrl run --run-dir runs/a`"),
        ('subprocess.run(["tool", "--run-dirs", "--steps", "--all"])',) * 2,
    ],
)
def test_an_error_leaves_python_alone_and_advises_python(text: str, says: str) -> None:
    async def fail() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.sleep(1000))
                raise ValueError("beside")
        except* ValueError as errors:
            raise ConfigError(text) from errors

    with pytest.raises(ConfigError) as caught:
        run_here_or_beside(fail())
    assert str(caught.value) == says
    assert caught.value.__cause__ is caught.value.__context__ is None


async def test_inside_a_loop_it_runs_beside() -> None:
    assert run_here_or_beside(double(3)) == 6


async def test_an_interrupt_of_the_thread_that_waits_stops_what_runs_beside() -> None:
    main = threading.main_thread().ident
    stopped = []
    assert main is not None

    async def until_cancelled() -> None:
        await asyncio.to_thread(until_it_waits, main)
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a notebook
    try:
        with pytest.raises(KeyboardInterrupt):
            run_here_or_beside(until_cancelled())
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped == [True]


class InterruptedSubmit(ThreadPoolExecutor):
    """The interrupt comes while the work is handed over: once it is queued, or before."""

    queued = True

    def submit(self, function: Any, /, *args: Any, **named: Any) -> Any:
        if not args or self.queued:
            future = super().submit(function, *args, **named)
        if args:
            raise KeyboardInterrupt
        return future


@pytest.mark.parametrize("queued", [True, False])
async def test_an_interrupt_while_work_is_handed_over_leaves_nothing_running(
    queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until_cancelled() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(InterruptedSubmit, "queued", queued)
    monkeypatch.setattr(interrupts, "ThreadPoolExecutor", InterruptedSubmit)
    work = until_cancelled()
    with pytest.raises(KeyboardInterrupt):
        run_here_or_beside(work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncrl.train")]


def test_a_reward_without_a_name_of_its_own_is_called_by_that_of_its_function() -> None:
    def scaled(sample: object, *, by: float) -> float:
        return by

    said: list[str] = []
    named, here = _by_name([{"use": partial(scaled, by=2.0)}])
    assert not named
    assert list(_reward_here(here, RewardConfig(), said.append)) == ["reward"]
    with pytest.raises(ConfigError, match=r"reward\.model works beside .* scaled has no importable name"):
        _reward_here(here, RewardConfig(model="folder"), said.append)
    with pytest.raises(ConfigError, match=r"reward\.replicas = 2 needs .* scaled has no importable name"):
        _reward_here(here, RewardConfig(replicas=2), said.append)
    assert said == ["reward scaled has no importable name: it is called in this process"]


def test_rewards_are_functions_or_a_section_whose_functions_have_keys() -> None:
    named, here = _reward({"functions": ["numeric", {"use": "length", "weight": -0.1}], "on_error": "zero"})
    functions = [{"use": "numeric"}, {"use": "length", "weight": -0.1}]
    assert (named, here) == ({"functions": functions, "on_error": "zero"}, [])
    assert _reward({"use": "length", "weight": 2}) == ({"functions": [{"use": "length", "weight": 2}]}, [])
    assert _reward({"model": "folder", "functions": []}) == ({"model": "folder", "functions": []}, [])
    assert _reward({"model": "folder"}) == ({"model": "folder"}, [])
    assert _reward(["numeric", "length"])[0] == {"functions": [{"use": "numeric"}, {"use": "length"}]}
    with pytest.raises(ConfigError, match=r"lambda has no importable name, which weight needs: put it into a module"):
        _reward({"functions": [{"use": lambda sample: 1.0, "weight": 2}]})
    with pytest.raises(ConfigError, match=r"not \{'on_error': 'zero'\}$"):
        _reward({"on_error": "zero"})
    for wrong in ([], {"functions": [{"weight": 2}]}, None, 3):
        with pytest.raises(ConfigError, match=r'^reward: write a function of a Sample.*"on_error": "zero"\}, not'):
            _reward(wrong)  # type: ignore[arg-type]


def test_an_environment_is_a_class_that_other_processes_can_import() -> None:
    assert _environment("guess") == {"use": "guess"}
    assert _environment(Path) == {"use": "pathlib:Path"}
    tools = {"use": "tools", "options": {"functions": [len, "shop.py:price"], "form": "llama3"}}
    named = {"functions": ["builtins:len", "shop.py:price"], "form": "llama3"}
    assert _environment(tools) == {"use": "tools", "options": named}

    class Local:
        pass

    with pytest.raises(ConfigError, match=r"environment: Local has no importable name, .* put it into a module"):
        _environment({"use": Local, "max_turns": 3})
    with pytest.raises(ConfigError, match=r"environment\.options\.functions: lambda has no importable name"):
        _environment({"use": "tools", "options": {"functions": [lambda: 1]}})
    for wrong in (3, {"options": {}}):
        with pytest.raises(ConfigError, match="environment: write a class, its name, or a dict"):
            _environment(wrong)


def test_a_setting_or_a_dict_of_keys_is_a_section() -> None:
    assert _section("staleness", "limit", 3) == {"limit": 3}
    assert _section("staleness", "limit", {"limit": 4, "policy": "drop"}) == {"limit": 4, "policy": "drop"}
    with pytest.raises(ConfigError, match=r"staleness: write the value of staleness\.limit, or a dict of keys"):
        _section("staleness", "limit", [2])


def test_an_algorithm_is_a_preset_an_algorithm_or_keys_with_an_algorithm_among_them() -> None:
    assert _algorithm("rloo") == ({"preset": "rloo"}, None)
    assert _algorithm({"preset": "grpo", "kl": 0.01}) == ({"preset": "grpo", "kl": 0.01}, None)
    assert _algorithm({"custom": "algorithms.py:ALGORITHM"}) == ({"custom": "algorithms.py:ALGORITHM"}, None)
    assert _algorithm(grpo.ALGORITHM) == ({"custom": "asyncrl.algorithms.grpo:ALGORITHM"}, grpo.ALGORITHM)
    own = Algorithm(grpo.roll_out, grpo.train)
    assert _algorithm({"preset": "rloo", "custom": own}) == ({"preset": "rloo", "custom": "python:algorithm"}, own)

    class Broken:
        async def roll_out(self) -> None: ...

        train = grpo.train

    with pytest.raises(ConfigError, match=r"^algorithm: Algorithm\(roll_out, train\) is no algorithm: its roll"):
        _algorithm(Algorithm(Broken.roll_out, grpo.train))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^algorithm: lambda is no algorithm: it is one function"):
        _algorithm(lambda: 1)
    with pytest.raises(
        ConfigError, match="algorithm: 3 is no algorithm: it has no function roll_out, write `async def"
    ):
        _algorithm(3)


def test_dicts_of_keys_reach_the_config_and_mistakes_in_them_are_named() -> None:
    def order(**given: Any) -> Any:
        return asyncrl.api.train_async(**{"model": "m", "prompts": "nowhere.jsonl", "reward": "exact_match", **given})

    wrong = {"algorithm": {"preset": "gropo"}, "staleness": {"limit": -1, "polcy": "drop"}}
    with pytest.raises(ConfigError) as caught:
        asyncio.run(order(**wrong))
    for part in ("algorithm.preset", "did you mean grpo?", "staleness.limit", "did you mean staleness.policy?"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        asyncio.run(order(model={"name": "m", "dtype": "float8"}))
    with pytest.raises(ConfigError, match="a part of a group of 8 has 2 to 8 members"):
        asyncio.run(order(staleness={"limit": 1, "cut_at": 9}))


def test_half_an_algorithm_of_asyncrl_under_another_algorithm_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def own_train(fleet: Fleet, control: Controller) -> None:
        raise AssertionError("nothing starts")

    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"its roll_out is that of asyncrl\.algorithms\.grpo, .*leave `custom` out to run"
    ):
        asyncrl.train(
            model="warmed:reverse",
            prompts="asyncrl.tasks.builtin.reverse:training",
            reward="exact_match",
            algorithm={"preset": "remax", "custom": Algorithm(grpo.roll_out, own_train)},
            run_dir=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_an_old_name_of_the_package_names_the_new_one() -> None:
    with pytest.raises(AttributeError, match=r"asyncrl\.Page is called asyncrl\.Algorithm"):
        getattr(asyncrl, "Page")  # noqa: B009


def for_trl(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


def test_a_reward_that_was_written_for_another_library_is_recognised() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"is one of TRL's reward functions: write from_trl\(cell\)"):
        _by_name([{"use": in_a_cell("def cell(completions, **columns): return [1.0]")}])
    with pytest.raises(ConfigError, match=r"is one of verl's reward functions: write from_verl\(compute_score\)"):
        _by_name([{"use": compute_score}])
    problem = source_problem(f"{__file__}:for_trl", "reward.functions", partial(one_argument_mistake, {}))
    assert problem is not None
    assert problem.text.endswith("it is one of TRL's reward functions: write trl: before its name")
    group = in_a_cell("def cell(completions): return [1.0 for _ in completions]")
    assert _by_name([{"use": group}])[1] == [group], "a function of a group may call its samples so"


def in_a_cell(source: str) -> Any:
    """Returns the function `cell` as a notebook defines it: in a module that no other process can import."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    return names["cell"]


def test_functions_of_a_cell_are_rewards_and_algorithms_of_this_process() -> None:
    scored, here = _reward(in_a_cell("def cell(sample): return 1.0"))
    assert scored["functions"] == []
    assert [function(None) for function in here] == [1.0]
    algorithm = in_a_cell(
        "class cell:\n    async def roll_out(fleet, control, group): ...\n    async def train(fleet, control): ..."
    )
    said: list[str] = []
    assert _algorithm_here(None, "", said.append) is None
    assert _algorithm_here(grpo.ALGORITHM, "asyncrl.algorithms.grpo:ALGORITHM", said.append) is not None
    assert said == []
    keys, custom = _algorithm(algorithm)
    assert custom is not None
    assert _algorithm_here(custom, keys["custom"], said.append) is not None
    assert said == ["the algorithm has no importable name: only the same call resumes this run"]


@pytest.mark.parametrize("wrong", [3, "stop"])
def test_a_callback_is_a_plain_function(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"on_step: .*: write a plain function of a dict of metrics"):
        asyncrl.train(model="m", prompts=[{"prompt": "a"}], reward="exact_match", on_step=wrong)


def test_a_mistake_is_a_few_lines_in_a_notebook() -> None:
    with pytest.raises(ConfigError) as mistaken:
        asyncrl.train(model="m", prompts=[{"prompt": "a"}], reward="exact_match", steps=0, staleness=-1)
    lines = mistaken.value._render_traceback_()
    assert lines[0].startswith("ConfigError: 2 mistakes in the configuration:")
    assert len(lines) == 3


def test_a_finished_run_is_a_small_table(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    steps = [{"step": step, "reward/mean": step / 4} for step in (1, 2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in steps))
    evaluations = [
        {"version": 0, "mean": 0.5},
        {"version": 4, "mean": 0.75},
        {"version": 4, "mean": None, "name": "hard"},
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in evaluations))
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "steps": 4})
    assert [line.split(None, 1)[1] for line in repr(asyncrl.Run(tmp_path, config)).splitlines()] == [
        str(tmp_path),
        "4 of 4",
        "0.250 -> 1.000",
        "out      0.750 at version 4",
        "out hard unknown at version 4",
        "4",
    ]
