"""asyncrl run: train an experiment, or resume a run."""

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.install_hints import program
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.config.sources import Loaded
    from asyncrl.telemetry.run_directory import RunDirectory

USAGE = """\
usage: asyncrl run NAME|FILE [--run-dir DIR] [--seed N] [--steps N] [--section.key value ...]
       asyncrl run --run-dir DIR            resume the run in DIR with its own config

  NAME                 an experiment that comes with asyncrl (`asyncrl experiments` lists them)
  FILE                 a TOML file; its keys are listed by `asyncrl keys`
  --run-dir DIR        where everything is written, runs/NAME-TIME by default; a directory that holds a run
                       resumes it: the same command again is all it takes
  --accept-changes     resume although keys changed that change what is learned
  --print-config       print the whole config, with the place each value came from, and stop
  --restarts N         short for --fleet.restarts: start again by itself when the trainer or this process dies
  --section.key value  any key; a list takes the flag several times or a TOML list

command line > environment (ASYNCRL_SECTION__KEY) > file > default
Ctrl-C ends a run within ten seconds, with a checkpoint; a second Ctrl-C ends it at once. `asyncrl --help` lists the
exit codes."""

SHORT = {"--restarts": "--fleet.restarts"}


@dataclass(frozen=True, slots=True)
class RunCommand:
    """The parsed command. flags: flags that set config keys."""

    target: str | None
    run_dir: Path | None
    accept_changes: bool
    print_config: bool
    flags: list[str]


def main(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    request = parse(arguments)
    loaded = _load(request)
    if request.print_config:
        print(_described(loaded), end="")
        return 0
    with _run_dir(request, loaded.config) as run_dir:
        if loaded.config.fleet.restarts:
            from asyncrl.deploy.process.restarts import run_with_restarts

            return run_with_restarts(_child_arguments(arguments, run_dir), loaded.config.fleet.restarts)
        return train(loaded.config, run_dir, request.accept_changes, _command(arguments, run_dir))


def parse(arguments: Sequence[str]) -> RunCommand:
    """Takes out the flags of the command itself; the rest sets config keys.

    Raises:
        ConfigError: --run-dir without a directory, or neither an experiment nor a run directory.
    """
    waiting = list(arguments)
    target = waiting.pop(0) if waiting and not waiting[0].startswith("-") else None
    run_dir: Path | None = None
    switches: set[str] = set()
    flags: list[str] = []
    while waiting:
        flag, equals, value = waiting.pop(0).partition("=")
        match flag:
            case "--accept-changes" | "--print-config":
                switches.add(flag)
            case "--run-dir":
                run_dir = Path(value if equals else _directory(waiting))
            case _:
                flags.append(SHORT.get(flag, flag) + equals + value)
    if target is None and run_dir is None:
        raise ConfigError(f"name an experiment (`{program()} run quickstart`), a TOML file, or a --run-dir to resume")
    return RunCommand(target, run_dir, "--accept-changes" in switches, "--print-config" in switches, flags)


def _directory(waiting: list[str]) -> str:
    if not waiting or waiting[0].startswith("--"):
        raise ConfigError("--run-dir needs a directory")
    return waiting.pop(0)


def _load(request: RunCommand) -> "Loaded":
    from asyncrl.config.sources import load

    if request.target is not None:
        loaded = load(request.target, request.flags)
    else:
        assert request.run_dir is not None
        config_file = request.run_dir / "config.toml"
        if not config_file.is_file():
            raise ConfigError(f"{request.run_dir} holds no run to resume; name an experiment to start one there")
        loaded = load(config_file, request.flags)
    if request.target is None:
        _refuse_python_objects(request, loaded.config)
    if not (loaded.config.reward.functions or loaded.config.reward.model):
        raise ConfigError("reward.functions is empty: name at least one function, for instance FILE.py:reward")
    return loaded


def _refuse_python_objects(request: RunCommand, config: "Config") -> None:
    from asyncrl.algorithms.custom import FROM_PYTHON
    from asyncrl.config.schema import IN_MEMORY

    scored = config.reward.functions or config.reward.model
    given = [] if scored else ["a reward function that no other process can import"]
    given += ["prompts given as rows"] if config.task.prompts == IN_MEMORY else []
    given += ["an algorithm that cannot be imported"] if config.algorithm.custom == FROM_PYTHON else []
    if given:
        raise ConfigError(
            f"the run in {request.run_dir} was started from Python with {' and '.join(given)}: resume it there, with "
            f"the same call and run_dir={str(request.run_dir)!r}"
        )


def _described(loaded: "Loaded") -> str:
    from asyncrl.config.sources.keys import all_keys
    from asyncrl.config.toml_writer import dump

    return dump(loaded.config, {key: loaded.sources.get(key, "default") for key in all_keys()})


def _run_dir(request: RunCommand, config: "Config") -> AbstractContextManager[Path]:
    if request.run_dir is not None:
        return nullcontext(request.run_dir)
    from datetime import datetime

    from asyncrl.telemetry.run_directory import new_run_directory

    return new_run_directory(Path("runs"), f"{config.name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}")


def _command(arguments: Sequence[str], run_dir: Path) -> str:
    """Returns the command with which the user resumes this run."""
    named = any(argument.partition("=")[0] == "--run-dir" for argument in arguments)
    return f"{program()} {shlex.join(['run', *arguments, *([] if named else ['--run-dir', str(run_dir)])])}"


def _child_arguments(arguments: Sequence[str], run_dir: Path) -> list[str]:
    """Returns the arguments for a process that is started again after it died, without `--restarts`."""
    target = [arguments[0]] if arguments and not arguments[0].startswith("-") else []
    passed: list[str] = []
    waiting = list(arguments[len(target) :])
    while waiting:
        flag, equals, value = waiting.pop(0).partition("=")
        if SHORT.get(flag, flag) == "--fleet.restarts":
            del waiting[: 0 if equals else 1]
        else:
            passed.append(flag + equals + value)
    named = any(argument.partition("=")[0] == "--run-dir" for argument in passed)
    return [*target, *passed, *([] if named else ["--run-dir", str(run_dir)]), "--fleet.restarts=0"]


def train(config: "Config", run_dir: Path, accept_changes: bool, command: str) -> int:
    """Runs to the end in this process."""
    import asyncio

    from asyncrl.deploy.process.fork_client import forks_of

    with forks_of(config) as forks:  # It imports while we import, read prompts and look at the model.
        from asyncrl.deploy.run import run
        from asyncrl.deploy.run_request import RunRequest
        from asyncrl.telemetry.display import open_display

        with open_display(config.steps) as display:
            display.say(f"run directory: {run_dir}")
            directory = asyncio.run(run(RunRequest(config, run_dir, display, command, accept_changes, forks=forks)))
            display.say(_ending(directory, config.steps, command))
    return 0


def _ending(directory: "RunDirectory", steps: int, command: str) -> str:
    from asyncrl.telemetry.metrics_file import read_metrics

    done = max((int(line["version"]) for line in read_metrics(directory.metrics)), default=0)
    if done < steps:
        return f"stopped at step {done} of {steps}; go on with: {command}"
    run = shlex.quote(str(directory.path))
    return f"done; next: `{program()} samples {run}`, `{program()} export {run} TARGET`"
