"""`asyncrl.train(...)`: runs an experiment from a script or a notebook, and returns its results."""

import shlex
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from time import strftime
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from asyncrl.config.schema import IN_MEMORY, Config, RewardConfig
from asyncrl.config.sources import load
from asyncrl.config.user_code import name_of
from asyncrl.errors import ConfigError
from asyncrl.telemetry.jsonl import read_lines, read_metrics
from asyncrl.telemetry.run_directory import RunDirectory, new_run_directory
from asyncrl.telemetry.samples_file import read_samples

if TYPE_CHECKING:
    from asyncrl.controller.controller import Algorithm
    from asyncrl.controller.observers.evaluation import Evaluation
    from asyncrl.controller.training_run import OnStep
    from asyncrl.fleet.fleet import ServiceSpec

T = TypeVar("T")
Rows = Sequence[Mapping[str, Any]]
Function = Callable[..., Any]
RewardArgument: TypeAlias = str | Function | Sequence[str | Function | Mapping[str, Any]] | Mapping[str, Any]
SectionArgument: TypeAlias = Mapping[str, Any] | str | type


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A finished run. path: its directory. services: services of this process, for rewards without importable names."""

    path: Path
    config: Config
    services: "Mapping[str, ServiceSpec]" = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        """Returns a small table of what the run came to."""
        facts = self._facts()
        width = max(len(name) for name, _ in facts)
        return "\n".join(f"{name:{width}} {text}" for name, text in facts)

    def _facts(self) -> list[tuple[str, str]]:
        """Returns what a notebook shows of the run, by name."""
        directory = RunDirectory(self.path)
        lines = self.metrics
        rewards = [line["reward/mean"] for line in lines if line.get("reward/mean") is not None]
        evaluations = {line.get("name", ""): line for line in read_lines(directory.evaluations)}
        found = [("run", str(self.path)), ("steps", f"{lines[-1]['step'] if lines else 0} of {self.config.steps}")]
        found += [("reward", f"{rewards[0]:.3f} -> {rewards[-1]:.3f}")] if rewards else []
        for name, line in evaluations.items():
            mean = "unknown" if line["mean"] is None else f"{line['mean']:.3f}"
            found.append((f"held out {name}".strip(), f"{mean} at version {line['version']}"))
        made = sorted(int(each.name) for each in directory.checkpoints.glob("*") if each.name.isdecimal())
        return [*found, ("checkpoints", ", ".join(map(str, made)) or "none")]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Returns one dict for each step, with the names of docs/metrics.md."""
        return [dict(line) for line in read_metrics(RunDirectory(self.path).metrics)]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Returns the samples in `samples.jsonl`: prompt, text, reward by term, trained and masked tokens ..."""
        return [asdict(record) for record in read_samples(RunDirectory(self.path).samples)]

    def evaluate(self, prompts: str | Rows | None = None, name: str = "", step: str | int = "") -> "Evaluation":
        """Scores a checkpoint on held-out prompts, or in the episodes of a policy that acts. name: of a set of
        `evaluate.sets`; default: the prompts of the run's section `evaluate`. step: number of the checkpoint, or
        "best"; default: the newest one."""
        from asyncrl.deploy.standalone_evaluation import Wanted, evaluate_run

        if prompts is None and not (name or self.config.evaluate.prompts or self.config.acting.env):
            raise ConfigError(
                "there are no held-out prompts: write run.evaluate(prompts=...), or train with "
                'evaluate={"prompts": ...}'
            )
        wanted = Wanted(prompts, sets=() if self.config.acting.env and not name else (name,), step=str(step))
        return _run_to_end(evaluate_run(self.path, self.config, wanted, self.services))[0]

    def save_pretrained(self, target: str | Path, step: str | int = "") -> Path:
        """Copies the model and tokenizer of a checkpoint to a folder for `from_pretrained`. step: its number, or
        "best"; default: the newest one."""
        from asyncrl.deploy.commands.export import export

        export(self.path, Path(target), step=str(step))
        return Path(target)


def train(
    *,
    model: str | Mapping[str, Any],
    prompts: str | Rows,
    reward: RewardArgument | None = None,
    algorithm: "str | Algorithm | Mapping[str, Any] | object" = "grpo",
    steps: int = 100,
    staleness: int | Mapping[str, Any] = 2,
    run_dir: str | Path | None = None,
    accept_changes: bool = False,
    on_step: "OnStep | None" = None,
    **sections: SectionArgument,
) -> Run:
    """Trains `model` on `prompts` with `reward`; returns when all steps are done.

    Args:
        model: a form of `model.name`, or keys of the section: `{"name": "folder", "dtype": "bfloat16"}`.
        prompts: a form of `task.prompts`, a list of dicts with a `prompt` each, or a `datasets.Dataset`.
        reward: a function of a Sample, the name of one, or several, or keys of the section: `{"functions": [{"use": f,
            "weight": 0.5}]}`. A function without an importable name is called in this process.
        algorithm: a preset, an algorithm of your own, or keys of the section: `{"preset": "rloo", "custom": mine}`.
        staleness: the limit, or keys of the section: `{"limit": 4, "policy": "drop"}`.
        run_dir: the directory of an existing run, which is resumed; by default a fresh directory below runs/.
        on_step: is called with the metrics of each step, a dict with the names of docs/metrics.md, in the run's event
            loop. What it returns says whether the run shall end; the same call with its run_dir goes on.
        sections: further keys by section, as in the file: `training={"learning_rate": 3e-6}`. `environment` may be a
            class that other processes can import, or `{"use": Game, "options": {"size": 3}}`, and needs no reward.

    Raises ConfigError or TaskError with all mistakes. In a running event loop `await train_async(...)` blocks nothing.
    """
    begun = partial(train_async, model=model, prompts=prompts, reward=reward, algorithm=algorithm, steps=steps)
    begun = partial(begun, staleness=staleness, run_dir=run_dir, accept_changes=accept_changes, on_step=on_step)
    return _run_to_end(begun(**sections))


async def train_async(
    *,
    model: str | Mapping[str, Any],
    prompts: str | Rows,
    reward: RewardArgument | None = None,
    algorithm: "str | Algorithm | Mapping[str, Any] | object" = "grpo",
    steps: int = 100,
    staleness: int | Mapping[str, Any] = 2,
    run_dir: str | Path | None = None,
    accept_changes: bool = False,
    on_step: "OnStep | None" = None,
    **sections: SectionArgument,
) -> Run:
    """Trains as `train` does, on the caller's event loop."""
    from asyncrl.deploy.process.interrupts import in_python
    from asyncrl.deploy.run_fleet import RunRequest
    from asyncrl.deploy.run_setup import run
    from asyncrl.telemetry.display import open_cell_or_terminal

    scored, here = ({}, []) if reward is None else _reward(reward)
    chosen, custom = _algorithm(algorithm)
    own = {"model": _section("model", "name", model), "staleness": _section("staleness", "limit", staleness)}
    config = _config(prompts, {**own, "algorithm": chosen, "reward": scored, "steps": steps}, sections)
    _refuse_person_beside(here, config)
    _refuse_mistaken_callback(on_step)
    fresh = new_run_directory(Path("runs"), strftime("python-%Y%m%d-%H%M%S"))
    place = fresh if run_dir is None else nullcontext(Path(run_dir))
    with place as directory, open_cell_or_terminal(config) as display:
        request = RunRequest(
            config=config,
            run_dir=directory,
            display=display,
            command=f"the same call with run_dir={shlex.quote(str(directory))}",
            is_call=True,
            accept_changes=accept_changes,
            prompts=None if isinstance(prompts, str) else prompts,
            algorithm=_algorithm_here(custom, config.algorithm.custom, display.say),
            services=_reward_here(here, config.reward, display.say),
            on_step=on_step,
        )
        finished = await in_python(run(request))
    return Run(finished.path, config, request.services)


def _config(prompts: str | Rows, own: Mapping[str, Any], sections: Mapping[str, SectionArgument]) -> Config:
    """Returns the config of the arguments of a call. own: those that are no sections."""
    if prompts is None:
        raise ConfigError("prompts: write a form of task.prompts, a list of rows or a datasets.Dataset, not None")
    source = prompts if isinstance(prompts, str) else IN_MEMORY
    return load(None, (), values={**_with_names(sections), **own, "task.prompts": source}).config


class RLTrainer:
    """Trains a small policy that acts in an environment of Gymnasium, on the same fleet as a language model.

        asyncrl.RLTrainer({"algorithm": "PPO", "env": "CartPole-v1"}).train(400)

    Args:
        config: `algorithm` ("PPO" or "SAC"), `env`, `env_options`, `policy` ({"hidden_size": [256, 256], "activation":
            "gelu"}), `distributed` ({"num_workers": 4, "placement_strategy": "spread"}), `learning_rate`, `gamma`,
            `seed`, `name`, and sections of a config beside them: {"acting": {"environments": 16}}. With "spread" each
            worker is a process with environments of its own; with "pack" one process divides its environments over as
            many children.

    Raises ConfigError with every key that does not exist, and the closest one that does.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        from asyncrl.config.sources.trainer_keys import trainer_values

        self._values = trainer_values(config)
        self.config = load(None, (), values=self._values).config

    def train(self, steps: int, run_dir: str | Path | None = None) -> Run:
        """Trains to this step, each on the transitions of `acting.environments` x `acting.transitions`; returns when
        all are done. run_dir: of an existing run, which is resumed; by default a fresh directory below runs/."""
        return _run_to_end(self.train_async(steps, run_dir))

    async def train_async(self, steps: int, run_dir: str | Path | None = None) -> Run:
        """Trains as `train` does, on the caller's event loop."""
        from asyncrl.deploy.process.interrupts import in_python
        from asyncrl.deploy.run_fleet import RunRequest
        from asyncrl.deploy.run_setup import run
        from asyncrl.telemetry.display import open_cell_or_terminal

        config = load(None, (), values={**self._values, "steps": steps}).config
        fresh = new_run_directory(Path("runs"), strftime(f"{config.name}-%Y%m%d-%H%M%S"))
        place = fresh if run_dir is None else nullcontext(Path(run_dir))
        with place as directory, open_cell_or_terminal(config) as display:
            command = f"train({steps}, run_dir={shlex.quote(str(directory))}) of the same RLTrainer"
            request = RunRequest(config=config, run_dir=directory, display=display, command=command)
            finished = await in_python(run(request))
        return Run(finished.path, config)


def _refuse_person_beside(functions: Sequence[Function], config: Config) -> None:
    own = any(each.functions for each in config.evaluate.held_out)
    what = "feedback.ask works" if config.feedback.asks else "rewards of held-out sets work" if own else ""
    if functions and what:
        raise ConfigError(
            f"{what} beside functions that another process can import, and {name_of(functions[0])} has no importable "
            "name: put it into a module"
        )


def _refuse_mistaken_callback(on_step: Any) -> None:
    from asyncrl.deploy.preflight import refuse_no_callback

    if on_step is not None:
        refuse_no_callback(on_step, f"on_step: {on_step!r:.100}")


def _with_names(sections: Mapping[str, SectionArgument]) -> dict[str, Any]:
    """Returns the sections with that of the environment in plain values."""
    if (given := sections.get("environment")) is None:
        return dict(sections)
    return {**sections, "environment": _environment(given)}


def _environment(given: Any) -> dict[str, Any]:
    """Returns keys of the section, with names in place of classes and of tools."""
    keys = dict(given) if isinstance(given, Mapping) else {"use": given}
    keys["use"] = _importable(keys.get("use"), "environment")
    options = dict(keys.get("options", {}))
    if isinstance(tools := options.get("functions"), list | tuple):
        options["functions"] = [_importable(tool, "environment.options.functions") for tool in tools]
    return {**keys, "options": options} if options else keys


def _importable(given: Any, what: str) -> str:
    """Returns the name of what another process has to import."""
    from asyncrl.config.user_code import importable_name

    if isinstance(given, str):
        return given
    if not callable(given):
        raise ConfigError(f"{what}: write a class, its name, or a dict of keys of the section, not {given!r:.100}")
    if (name := importable_name(given)) is None:
        raise ConfigError(
            f"{what}: {name_of(given)} has no importable name, and environments run in processes of their own: put it "
            "into a module, and import it from there"
        )
    return name


def _section(name: str, key: str, given: Any) -> Mapping[str, Any]:
    """Returns keys of a section; a single value stands for `key`."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, int | str | PurePath):
        return {key: str(given) if isinstance(given, PurePath) else given}
    raise ConfigError(f"{name}: write the value of {name}.{key}, or a dict of keys of that section, not {given!r:.100}")


def _algorithm(given: Any) -> tuple[Mapping[str, Any], "Algorithm | None"]:
    """Returns keys of the section, with `custom` as a name, and the algorithm if it was given as an object."""
    from asyncrl.algorithms.algorithm_by_name import FROM_PYTHON, algorithm_from, importable_algorithm

    keys = _section("algorithm", "preset", given if isinstance(given, str | Mapping) else {"custom": given})
    if isinstance(own := keys.get("custom", ""), str):
        return keys, None
    custom = algorithm_from(own, f"algorithm: {name_of(own) if callable(own) else repr(own):.100}")
    return {**keys, "custom": importable_algorithm(own) or FROM_PYTHON}, custom


def _algorithm_here(custom: "Algorithm | None", name: str, say: Callable[[str], None]) -> "Algorithm | None":
    """Returns an algorithm given as an object under the name that its errors are attributed to."""
    from asyncrl.algorithms.algorithm_by_name import FROM_PYTHON

    if custom is None:
        return None
    if name == FROM_PYTHON:
        say("the algorithm has no importable name: only the same call resumes this run")
    return replace(custom, name="the algorithm" if name == FROM_PYTHON else name)


def _reward(given: RewardArgument) -> tuple[dict[str, Any], list[Function]]:
    """Returns keys of the section, and the functions that have no importable name."""
    keys = dict(given) if isinstance(given, Mapping) and "use" not in given else {"functions": given}
    if "model" in keys and not keys.get("functions"):
        return keys, []
    named, here = _by_name(_functions(keys.get("functions", given)))
    return {**keys, "functions": named}, here


def _functions(given: Any) -> list[Mapping[str, Any]]:
    """Returns each function with the keys that it was given."""
    several = given if isinstance(given, list | tuple) else [given]
    found = [one if isinstance(one, Mapping) else {"use": one} for one in several]
    if found and all(isinstance(one.get("use"), str) or callable(one.get("use")) for one in found):
        return found
    raise ConfigError(
        "reward: write a function of a Sample, the name of one (a template, FILE.py:NAME or module:NAME), a list of "
        'these, or a dict of keys of the section, {"functions": [{"use": f, "weight": 0.5}], "on_error": "zero"}, not '
        f"{given!r:.100}"
    )


def _by_name(functions: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Function]]:
    """Returns config entries of functions with importable names, and the functions without."""
    from asyncrl.config.sources.load_config import refuse_unknown_keys
    from asyncrl.config.user_code import importable_name
    from asyncrl.rewards.functions import taking_one

    named: list[dict[str, Any]] = []
    here: list[Function] = []
    for function in functions:
        use = function["use"]
        name = use if isinstance(use, str) else importable_name(use)
        if name is not None:
            named.append({**function, "use": name})
        elif len(function) > 1:
            keys = ", ".join(key for key in function if key != "use")
            refuse_unknown_keys(function)
            raise ConfigError(
                f"reward: {name_of(use)} has no importable name, which {keys} needs: put it into a module"
            )
        else:
            here.append(taking_one(use))
    if named and here:
        raise ConfigError(
            f"{name_of(here[0])} has no importable name, the other rewards have: put all of them into a module, or none"
        )
    return named, here


def _reward_here(
    functions: Sequence[Function], section: RewardConfig, say: Callable[[str], None]
) -> "dict[str, ServiceSpec]":
    """Returns a reward service of this process; empty without functions."""
    from asyncrl.fleet.fleet import ServiceSpec
    from asyncrl.protocols.service_contracts import Reward
    from asyncrl.services.reward import RewardService

    if not functions:
        return {}
    if section.replicas > 1:
        raise ConfigError(
            f"reward.replicas = {section.replicas} needs functions that another process can import, and "
            f"{name_of(functions[0])} has no importable name: put it into a module, or leave reward.replicas out"
        )
    if section.model:
        raise ConfigError(
            f"reward.model works beside functions that another process can import, and {name_of(functions[0])} has no "
            "importable name: put it into a module"
        )
    for function in functions:
        say(f"reward {name_of(function)} has no importable name: it is called in this process")
    return {"reward": ServiceSpec("reward", Reward, partial(RewardService, functions=functions), here=True)}


def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    from asyncrl.deploy.process.interrupts import run_here_or_beside

    return run_here_or_beside(work)
