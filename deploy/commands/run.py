"""`asyncrl run` trains an experiment, or resumes a run."""

import builtins
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.install_hints import program
from asyncrl.deploy.commands.command_parser import CommandParser, positive
from asyncrl.errors import ConfigError, Interrupted
from asyncrl.telemetry.run_directory import (
    CONTROLLER_LOG,
    RunDirectory,
    is_in_store,
    missing_run,
    new_run_directory,
    refuse_address,
)

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.config.sources import Loaded
    from asyncrl.controller.training_run import OnStep
    from asyncrl.deploy.process.fork_client import Forks

USAGE = """\
usage: asyncrl run NAME|FILE [--run-dir DIR] [--seed N] [--steps N] [--section.key value ...]
       asyncrl run --run-dir DIR            resume the run in DIR with its own config

  NAME                 an experiment that comes with asyncrl (`asyncrl experiments` lists them)
  FILE                 a TOML file; its keys are listed by `asyncrl keys`
  --run-dir DIR        where everything is written, runs/NAME-TIME by default; a directory that holds a run
                       resumes it: the same command again is all it takes. s3://BUCKET/PATH: each checkpoint is
                       copied there (extra `s3`), and a machine that has no such run begins with the copy
  --stop-at STEP       end in order after this step; the same command with a later one goes on
  --accept-changes     resume although keys changed that change what is learned
  --record             short for --telemetry.record_gb 1: keep what services were given, for `asyncrl replay`
  --listen ADDRESS     short for --fleet.wire tcp --fleet.listen tcp://HOST:PORT, where workers of fleet.joined join
  --on ray             start the workers that may join on a Ray cluster, and one on this machine if there is none
  --address ADDRESS    HOST:PORT of that cluster; default: the one of this Ray job, or RAY_ADDRESS
  --print-config       print the whole config, with the place each value came from, and stop
  --restarts N         short for --fleet.restarts: start again by itself when the trainer or this process dies
  --section.key value  any key; a list takes the flag several times or a TOML list

command line > environment (ASYNCRL_SECTION__KEY) > file > default
Ctrl-C, SIGTERM or the end of the terminal ends a run with a checkpoint of its newest version; a step that takes
longer than a third of --fleet.grace (20 seconds) is undone. A second Ctrl-C ends the run at once.
`asyncrl --help` lists the exit codes."""

RESUMABLE = 75
RECORD_GB = 1.0
"""Gigabytes of records of each worker with --record."""
ACCEPT = "--accept-changes"
Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]


@dataclass(frozen=True, slots=True)
class RunCommand:
    """The parsed command. target: config.toml of `run_dir` where the command names no experiment. flags: set config
    keys; restarts: those that set `fleet.restarts`. cluster: "ray", or ""; address: of the cluster. listen: where
    workers join."""

    target: str | Path
    run_dir: Path | None
    accept_changes: bool
    print_config: bool
    flags: list[str]
    restarts: list[str]
    cluster: str = ""
    address: str = ""
    listen: str = ""
    store: str = ""
    stop_at: int = 0


def main(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    request = parse(arguments)
    if request.print_config:
        from asyncrl.config.sources.keys import all_keys
        from asyncrl.config.toml_writer import dump

        loaded = _load(request)
        print(dump(loaded.config, {key: loaded.sources.get(key, "default") for key in all_keys()}), end="")
        return 0
    from asyncrl.config.sections.secret import without_secrets
    from asyncrl.deploy.process.fork_client import early_forks

    with early_forks() as forks:  # They import while this process reads the config, and imports what it needs itself.
        loaded = _load(request)
        config = loaded.config
        _hide_flags(arguments, config)

        fresh = new_run_directory(Path("runs"), f"{config.name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}")
        with fresh if request.run_dir is None else nullcontext(request.run_dir) as run_dir:
            if not config.fleet.restarts:
                named = ["--run-dir", str(run_dir)] if request.run_dir is None else []
                again = [argument for argument in arguments if argument != ACCEPT]  # What changed is taken over once.
                command = without_secrets(f"{program()} {shlex.join(['run', *again, *named])}", config)
                with _on_cluster(request, loaded, run_dir) as placed:
                    return train(placed, run_dir, request, command, forks)
            if forks is not None:
                forks.end()  # The child begins its own.
            return run_with_restarts(_child_arguments(request, run_dir), config.fleet.restarts, run_dir)


def _hide_flags(arguments: Sequence[str], config: "Config") -> None:
    """Takes secrets of flags out of the command line that `ps` shows to other users."""
    from asyncrl.config.sections.secret import without_secrets
    from asyncrl.deploy.process.worker_main import rename

    typed = shlex.join(["asyncrl", "run", *arguments])
    if (shown := without_secrets(typed, config)) != typed:
        rename("asyncrl", shown)


def parse(arguments: Sequence[str]) -> RunCommand:
    """Takes out the flags of the command itself; the rest sets config keys. Raises ConfigError."""
    parser = CommandParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run-dir", nargs="?", const="")
    parser.add_argument(ACCEPT, action="store_true")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--stop-at", type=positive, default=0)
    parser.add_argument("--listen", default="")
    parser.add_argument("--on", default="")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--address", default="")
    parser.add_argument("--restarts", "--fleet.restarts", nargs="?", const="", action="append", default=[])
    named = [argument for argument in arguments[:1] if not argument.startswith("-")]
    asked, flags = parser.parse_known_args(arguments[len(named) :])
    if asked.on not in ("", "ray"):
        raise ConfigError(f"--on: there is no {asked.on!r}; write --on ray")
    if asked.address and not asked.on:
        raise ConfigError("--address is that of a Ray cluster: write --on ray too")
    if asked.run_dir == "":
        raise ConfigError("--run-dir needs a directory")
    if not named and asked.run_dir is None:
        if file := next((flag for flag in flags if flag.endswith(".toml")), None):
            raise ConfigError(f"the experiment comes first: `{program()} run {file}`, and then flags")
        raise ConfigError(f"name an experiment (`{program()} run quickstart`), a TOML file, or a --run-dir to resume")
    store = asked.run_dir if is_in_store(asked.run_dir or "") else ""
    run_dir = None if asked.run_dir is None else _stored(store) if store else Path(asked.run_dir)
    if run_dir is not None:
        refuse_address(run_dir)
    target = named[0] if named or run_dir is None else run_dir / "config.toml"
    if isinstance(target, Path) and not target.is_file():
        if (target.parent / "journal").exists():
            raise ConfigError(f"{target} is gone: name the experiment too, `{program()} run NAME --run-dir {run_dir}`")
        raise missing_run(target.parent, "holds no run to resume; name an experiment to start one there")
    restarts = [f"--fleet.restarts={number}" if number else "--fleet.restarts" for number in asked.restarts]
    listens = [f"--fleet.listen={asked.listen}", "--fleet.wire=tcp"] if asked.listen else []
    flags += [*listens, *([f"--telemetry.record_gb={RECORD_GB:g}"] if asked.record else [])]
    cluster = (asked.on, asked.address, asked.listen, store, asked.stop_at)
    return RunCommand(target, run_dir, asked.accept_changes, asked.print_config, flags, restarts, *cluster)


def _stored(address: str) -> Path:
    from asyncrl.deploy.process.stored_runs import stored_run

    return stored_run(address)


def _child_arguments(request: RunCommand, run_dir: Path) -> list[str]:
    """Returns the arguments for a process that is started again after it died, without `--restarts`."""
    target = [request.target] if isinstance(request.target, str) else []
    accept = [ACCEPT] if request.accept_changes else []
    accept += ["--stop-at", str(request.stop_at)] if request.stop_at else []
    accept += ["--on", request.cluster] if request.cluster else []
    accept += ["--address", request.address] if request.address else []
    return [*target, *request.flags, *accept, "--run-dir", request.store or str(run_dir), "--fleet.restarts=0"]


@contextmanager
def _on_cluster(request: RunCommand, loaded: "Loaded", run_dir: Path) -> "Iterator[Loaded]":
    """Starts workers on a cluster if the command asks for one; yields the config with which they join."""
    if not request.cluster:
        yield loaded
        return
    from asyncrl.deploy.ray_hosts import ray_hosts

    def say(text: str) -> None:
        print(text, flush=True)

    with ray_hosts(loaded.config, run_dir, address=request.address, listen=request.listen, say=say) as flags:
        yield _load(request, flags)


def _load(request: RunCommand, more: Sequence[str] = ()) -> "Loaded":
    from asyncrl.config.sections.secret import with_kept_secrets
    from asyncrl.config.sources import load

    loaded = load(request.target, [*request.flags, *request.restarts, *more])
    loaded = replace(loaded, config=with_kept_secrets(loaded.config, request.run_dir))
    if isinstance(request.target, Path):
        _refuse_python_objects(request.target.parent, loaded.config)
    return loaded


def _refuse_python_objects(run_dir: Path, config: "Config") -> None:
    from asyncrl.algorithms.algorithm_by_name import FROM_PYTHON
    from asyncrl.config.schema import IN_MEMORY

    scored = config.is_scored
    given = [] if scored else ["a reward function that no other process can import"]
    given += ["prompts given as rows"] if config.task.prompts == IN_MEMORY else []
    given += ["an algorithm that cannot be imported"] if config.algorithm.custom == FROM_PYTHON else []
    if given:
        raise ConfigError(
            f"the run in {run_dir} was started from Python with {' and '.join(given)}: resume it there, with "
            f"the same call and run_dir={str(run_dir)!r}"
        )


def train(loaded: "Loaded", run_dir: Path, request: RunCommand, command: str, begun: "Forks | None") -> int:
    """Runs to the end in this process. Raises Interrupted, with the command that goes on, also for a signal that comes
    before the run handles signals itself or when it no longer does."""
    import asyncio

    try:
        return _train(loaded, run_dir, request, command, begun)
    except (KeyboardInterrupt, asyncio.CancelledError) as pressed:
        if isinstance(pressed.__context__, Interrupted):
            raise pressed.__context__ from None
        raise Interrupted(f"interrupted. Go on with: {command}") from None


def _train(loaded: "Loaded", run_dir: Path, request: RunCommand, command: str, begun: "Forks | None") -> int:
    import asyncio

    from asyncrl.deploy.process.fork_client import forks_of

    with forks_of(loaded.config, begun) as forks:
        from asyncrl.deploy.checks.run_prompts import with_steps_of_epochs
        from asyncrl.deploy.preflight import step_callback
        from asyncrl.deploy.run_fleet import RunRequest
        from asyncrl.deploy.run_setup import run
        from asyncrl.telemetry.bottleneck import workers_of
        from asyncrl.telemetry.display import open_display

        config = with_steps_of_epochs(loaded.config)  # The display counts steps.
        every = config.telemetry.print_every
        with open_display(config.steps, workers=workers_of(config), print_every=every) as display:
            wanted = RunRequest(config, run_dir, display, command, request.accept_changes, loaded.sources, forks=forks)
            wanted = replace(wanted, store=request.store)
            if request.stop_at:
                wanted = replace(wanted, on_step=partial(_ends_after, request.stop_at, step_callback(config)))
            asyncio.run(run(wanted))
    return 0


def _ends_after(last: int, on_step: "OnStep | None", metrics: dict[str, float]) -> bool:
    """Returns whether the run shall end after this step: as --stop-at says, or the function of the config."""
    asked = on_step is not None and on_step(metrics)
    return bool(asked) or metrics["step"] >= last


def start_run(arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "asyncrl.deploy.cli", "run", *arguments])


def run_with_restarts(arguments: Sequence[str], restarts: int, run_dir: Path, start: Start = start_run) -> int:
    """Runs the command in a child, and at most `restarts` times again after exit code 75 or a death by a signal, then
    without ACCEPT: what has changed is taken over once. A mistake that the run names at a checkpoint for the second
    time is left to a person: the next start would name it, too. A run that was told to end is not started again,
    however it ends. Returns the last exit code."""
    named = set[tuple[str, int]]()
    before = len(_ends(run_dir))
    told: list[int] = []
    for left in range(restarts, -1, -1):
        code = _run_once(arguments, start, told)
        arguments = [argument for argument in arguments if argument != ACCEPT]
        if told or left == 0 or (code >= 0 and code != RESUMABLE):
            break
        ends = _ends(run_dir)[before:]  # None where a full disk took no line.
        before += len(ends)
        if code == RESUMABLE and ends and (mistake := _named_mistake(ends[-1], run_dir)):
            if mistake in named:
                where = f"at the checkpoint of step {mistake[1]}"
                print(f"asyncrl: this is the second {mistake[0]} {where}; it is not started again", file=sys.stderr)
                break
            named.add(mistake)
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        print(f"asyncrl: the run ended with {ending}; starting it again ({left} left)", file=sys.stderr)
    return code if code >= 0 else RESUMABLE


def _ends(run_dir: Path) -> list[str]:
    """Returns the error with which each start of a run ended so far, "" for none."""
    from asyncrl.telemetry.jsonl import read_lines

    lines = read_lines(RunDirectory(run_dir).logs / CONTROLLER_LOG)
    return [str(line.get("error", "")) for line in lines if line.get("event") == "run ends"]


def _named_mistake(end: str, run_dir: Path) -> tuple[str, int] | None:
    """Returns the kind of error with which a start of a run ended, and the newest checkpoint; None where the fleet or
    one of its workers failed, or a disk or memory was full, which the next start may find mended."""
    kind = end.partition(":")[0]
    if kind in ("", "FleetFailed", "RemoteError") or issubclass(getattr(builtins, kind, object), OSError | MemoryError):
        return None
    return kind, max((int(each.name) for each in RunDirectory(run_dir).checkpoints.glob("[0-9]*")), default=0)


def _run_once(arguments: Sequence[str], start: Start, told: list[int]) -> int:
    """Returns the exit code of a run. told: takes the signals by which this process is told to end it."""
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        told.append(number)
        if children:
            children[0].send_signal(number)
        else:
            early.append(number)

    # A terminal sends Ctrl-C to both of us; the child decides how to end. Other signals may reach only this process.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: told.append(number)),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
    }
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, for the child too.
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, pass_on)
    try:
        if told:  # Between two children.
            return RESUMABLE
        children.append(start(arguments))
        for number in early:
            children[0].send_signal(number)
        return children[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
