"""`asyncrl doctor` checks this machine, what an experiment needs, or whether workers of this host could join a run."""

import asyncio
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.install_hints import program
from asyncrl.deploy.checks.machine import (
    IMPORT_DEADLINE,
    Check,
    available_memory,
    check,
    gpu_package_problems,
    machine_checks,
    size_text,
    usable_cores,
)
from asyncrl.deploy.commands.command_parser import CommandParser
from asyncrl.deploy.process.fork_client import MODULES, CannotFork, ForkedWorker, Forks
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
INSTEAD = "workers are spawned and import for themselves, which makes the start slower and takes more memory"


def main(arguments: list[str]) -> int:
    options, flags = _parser().parse_known_args(arguments)
    if options.join is None:
        if options.target is not None:
            with suppress(ImportError):  # The checks say what is missing.
                from asyncrl.config.sources.load_config import refuse_unknown

                refuse_unknown(options.target)
        command = shlex.join(["run", options.target or "quickstart", *flags])
        return _print_all(checks(options.target, flags), lambda: command)
    if flags or options.key is None:
        raise ConfigError("with --join write the key of the workers: asyncrl doctor [ROLE] --join ADDRESS --key FILE")
    from asyncrl.deploy.commands.join_checks import join_checks
    from asyncrl.fleet.launching.key_folder import WorkerKey

    return _print_all(
        join_checks(options.join, options.key, options.target or ""),
        lambda: shlex.join(["join", WorkerKey.read(options.key).role, "--to", options.join, "--key", str(options.key)]),
    )


def _parser() -> CommandParser:
    usage = "asyncrl doctor [-h] [NAME|FILE [--section.key value ...]] | [ROLE] --join tcp://HOST:PORT --key FILE"
    epilog = "The exit status is 1 when a line begins with BAD; the line below it says how to repair that."
    parser = CommandParser("asyncrl doctor", usage, __doc__, epilog, allow_abbrev=False)
    text = "Check the needs of this experiment too; with --join: the role that the key should have."
    parser.add_argument("target", nargs="?", metavar="NAME|FILE|ROLE", help=text)
    text = "Check only whether workers of this host could join the run that listens there."
    parser.add_argument("--join", metavar="tcp://HOST:PORT", help=text)
    parser.add_argument("--key", type=Path, metavar="FILE", help="Key of the workers that are to join.")
    return parser


def _print_all(found: Iterable[Check], command: Callable[[], str]) -> int:
    """Prints the checks, and the command that they allow. Returns the exit status."""
    bad = 0
    for each in found:
        print(each, flush=True)
        bad += each.status == "bad"
    print(f"\n{bad} to repair" if bad else f"\nready: {program()} {command()}")
    return 1 if bad else 0


def checks(target: str | None, flags: list[str]) -> Iterator[Check]:
    yield from machine_checks()
    yield from (Check("GPU packages", "note", str(problem)) for problem in gpu_package_problems({}))
    yield fork_check()
    if target is not None:
        yield from experiment_checks(target, flags)


def experiment_checks(target: str, flags: list[str]) -> Iterator[Check]:
    """Checks what one experiment needs, as far as this installation can read it."""
    try:
        from asyncrl.config.sources import load

        loaded = load(target, flags)
    except ImportError as error:
        yield Check(target, "bad", f"cannot be read: {error}", "install what is missing above, then ask again")
        return
    except ConfigError as error:
        yield Check(target, "bad", str(error).replace("\n", f"\n{'':26}"), "correct the experiment, then ask again")
        return
    from asyncrl.deploy.preflight import devices, preflight

    config = loaded.config
    yield Check(target, "ok", f"{config.steps} steps of {config.task.prompts_per_step} prompts")
    problems = list(preflight(config, places=loaded.sources))  # `asyncrl run` refuses these or warns about them.
    for problem in problems:
        yield Check("config" if problem.key else "machine", "note" if problem.is_warning else "bad", str(problem))
    if not config.environment.use and not config.acting.env:
        from asyncrl.deploy.checks.run_prompts import prompt_checks

        yield from prompt_checks(config, counts=all(problem.is_warning for problem in problems))
    yield from _containment_checks(config)
    yield _workers_check(config)
    yield _weights_check(config)
    tried = {key: device for key, device in devices(config).items() if device != "cpu"}
    if tried and not any(problem.key in tried for problem in problems):
        yield Check("devices", "ok", ", ".join(f"{key} = {device}" for key, device in tried.items()))
    yield from _memory_checks(config)


def _containment_checks(config: "Config") -> Iterator[Check]:
    """Says whether code of the user is contained; `preflight` says where that does not work."""
    from asyncrl.deploy.preflight import code_of_user, containment_problems

    if not (names := code_of_user(config)):
        return
    if config.children.sandbox == "none":
        remedy = 'children.sandbox = "none": it may do what you may; SECURITY.md says what bubblewrap keeps from it'
        yield Check("your code", "note", f"nothing contains {', '.join(names)}", remedy)
    elif not any(containment_problems(config)):
        yield Check("your code", "ok", f"bubblewrap contains {', '.join(names)}")


def _workers_check(config: "Config") -> Check:
    from asyncrl.config.placement import ONE_REPLICA, Placement
    from asyncrl.deploy.service_specs import worker_count

    workers = worker_count(config)
    threads = config.fleet.threads
    # Ranks of the trainer that sample do not train meanwhile, and those that join have cores of their own.
    placed = Placement.of(config).workers
    here = {name: sum(not each.joins for each in those) for name, those in placed.items()}
    generating = here["generation"] * config.generation.layout_tp
    busiest = (generating + sum(here.get(service, 0) for service in ONE_REPLICA)) * threads
    apart = sum(each.joins for those in placed.values() for each in those)
    elsewhere = f", {apart} of them on hosts that join" if apart else ""
    found = f"{workers} with {threads} torch threads each{elsewhere}; {usable_cores():g} cores here"
    remedy = "the workers will slow each other down: lower fleet.threads or generation.replicas"
    return check("workers", busiest <= usable_cores() or threads == 1, found, remedy, "note")


def _weights_check(config: "Config") -> Check:
    from asyncrl.fleet.weight_transport import transport_of

    if not config.publishes_weights:
        return Check("weights", "ok", "the trainer's ranks sample, and nothing is published")
    chosen = transport_of(config)
    coded = f", codec {config.weights.codec}" if chosen.facts.encodes else ""
    return Check("weights", "ok", f"transport {chosen.name}{coded}: {chosen.reason}")


def _memory_checks(config: "Config") -> Iterator[Check]:
    from asyncrl.deploy.checks.memory_needs import longest_token_of, needs, planned_workers, shared_memory
    from asyncrl.deploy.checks.model_checks import here
    from asyncrl.deploy.checks.run_prompts import measured_lengths
    from asyncrl.engines.models.model_shape import shape_of

    name = str(here(config.model))
    shape = shape_of(name)
    if shape is None:
        remedy = "the size of a model that is not on this machine is unknown; give a folder to have it estimated"
        yield Check("model", "note", config.model.name, remedy)
        return
    yield Check("model", "ok", f"{config.model.name}, about {shape.parameters / 1e6:.1f}M parameters")
    lengths = measured_lengths(config, name)
    yield Check("prompt tokens", "ok", str(lengths))
    found = needs(config, shape, lengths)
    for need in found:
        yield Check(need.name, "ok", f"about {size_text(need.expected)}, at most {size_text(need.bytes)}: {need.doc}")
    planned = planned_workers(config, shape, lengths)
    total = sum(each.bytes for each in planned if each.is_here and each.device == "cpu")
    available = available_memory()
    remedy = "lower training.micro_batch_tokens or generation.slots, or set training.gradient_checkpointing"
    text = f"at most {size_text(total)} of {size_text(available)} available"
    yield check("services on the CPU", total <= available, text, remedy)
    shared = shared_memory(config, shape, longest_token_of(name), lengths)
    rows = f"rows about {size_text(shared.likely_rows)}, at most {size_text(shared.rows)}"
    yield Check("shared memory", "ok", f"weights {size_text(shared.weights)}, {rows}")  # `preflight` says what lacks.


def fork_check(modules: Sequence[str] = MODULES) -> Check:
    """Forks a worker and measures its memory. modules: imported before."""
    try:
        if sys.platform != "linux":
            raise CannotFork("only on Linux")
        return Check("forked workers", "ok", asyncio.run(_measure(modules)))
    except CannotFork as why:
        return Check("forked workers", "note", str(why), INSTEAD)


async def _measure(modules: Sequence[str]) -> str:
    with (
        Forks(os.environ, modules, IMPORT_DEADLINE, say=lambda text: None) as forks,
        tempfile.TemporaryFile() as output,
    ):
        _end(await forks.fork("torch", "doctor", output))  # It waits for the imports.
        began = time.monotonic()
        worker = await forks.fork("torch", "doctor", output)
        took = time.monotonic() - began
        try:
            return f"start in {took:.2f} s, {_memory_text(worker.pid)} at first"
        finally:
            _end(worker)


def _memory_text(pid: int) -> str:
    """Returns the memory that a process shares with others and has alone, with the files that it maps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kilobytes = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", lines, re.MULTILINE)}
    shared, own = (kilobytes[f"{kind}_Clean"] + kilobytes[f"{kind}_Dirty"] for kind in ("Shared", "Private"))
    return f"share {shared / 1024:.0f} MB and own {own / 1024:.0f} MB"


def _end(worker: ForkedWorker) -> None:
    worker.kill()
    worker.stdin.close()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    worker.poll()
