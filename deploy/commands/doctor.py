"""asyncrl doctor: check what this machine can run, and what an experiment needs."""

import argparse
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.install_hints import program
from asyncrl.deploy.checks.machine import (
    Check,
    available_memory,
    check,
    device_checks,
    machine_checks,
    shared_memory_check,
    usable_cores,
)
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("asyncrl doctor", description=__doc__, epilog="exit status 1: something is BAD")
    parser.add_argument("target", nargs="?", metavar="NAME|FILE", help="an experiment: what it needs is checked too")
    options, flags = parser.parse_known_args(arguments)
    bad = 0
    for found in checks(options.target, flags):
        print(found, flush=True)
        bad += found.status == "bad"
    command = shlex.join(["run", options.target or "quickstart", *flags])
    print(f"\n{bad} to repair" if bad else f"\nready: {program()} {command}")
    return 1 if bad else 0


def checks(target: str | None, flags: list[str]) -> Iterator[Check]:
    yield from machine_checks()
    yield from fork_checks()
    if target is not None:
        yield from experiment_checks(target, flags)


def fork_checks() -> Iterator[Check]:
    """Nothing where asyncrl cannot be imported, for that is said already."""
    try:
        from asyncrl.deploy.checks.fork_sharing import fork_check
    except ImportError:
        return
    yield fork_check()


def experiment_checks(target: str, flags: list[str]) -> Iterator[Check]:
    """Checks what one experiment needs, as far as this installation can read it."""
    try:
        from asyncrl.config.sources import load

        config = load(target, flags).config
    except ImportError as error:
        yield Check(target, "bad", f"cannot be read: {error}", "install what is missing above, then ask again")
        return
    except ConfigError as error:
        yield Check(target, "bad", str(error).replace("\n", f"\n{'':26}"), "correct it, then ask again")
        return
    yield Check(target, "ok", f"{config.steps} steps of {config.task.prompts_per_step} prompts")
    yield from _problem_checks(config)
    yield _workers_check(config)
    yield from device_checks(_devices(config))
    yield from _memory_checks(config)


def _problem_checks(config: "Config") -> Iterator[Check]:
    """Checks what `asyncrl run` refuses or warns about."""
    from asyncrl.deploy.preflight import preflight

    for problem in preflight(config):
        yield Check(problem.key or "machine", "note" if problem.is_warning else "bad", str(problem))


def _devices(config: "Config") -> dict[str, str]:
    found = {"generation.device": config.generation.device, "training.device": config.training.device}
    found |= {"reference.device": config.reference.device} if config.algorithm.kl > 0 else {}
    found |= {"reward.device": config.reward.device} if config.reward.model else {}
    found |= {"critic.device": config.critic.device} if config.algorithm.advantage == "gae" else {}
    if config.algorithm.constraint == "lagrangian":
        found |= {"cost.device": config.cost.device} if config.cost.model else {}
        found |= {"cost_critic.device": config.cost_critic.device}
    return found


def _workers_check(config: "Config") -> Check:
    from asyncrl.deploy.service_specs import worker_count

    workers = worker_count(config)
    threads = workers * config.fleet.threads
    critics = (config.algorithm.advantage == "gae") + (config.algorithm.constraint == "lagrangian")
    learners = config.training.layout_dp + critics
    busiest = (config.generation.replicas + learners) * config.fleet.threads
    found = f"{workers} with {config.fleet.threads} torch threads each, {usable_cores():g} cores"
    if busiest <= usable_cores() or threads == workers:
        return Check("workers", "ok", found)
    return Check("workers", "note", found, "they will slow each other down: lower fleet.threads or generation.replicas")


def _memory_checks(config: "Config") -> Iterator[Check]:
    from asyncrl.deploy.checks.memory_needs import needs, shape_of, shared_memory, size_text

    shape = shape_of(config.model.name)
    if shape is None:
        remedy = "the size of a model that is not on this machine is unknown; give a folder to have it estimated"
        yield Check("model", "note", config.model.name, remedy)
        return
    yield Check("model", "ok", f"{config.model.name}, about {shape.parameters / 1e6:.1f}M parameters")
    found = needs(config, shape)
    for need in found:
        yield Check(need.name, "ok", f"about {size_text(need.bytes)}: {need.doc}")
    total, there = sum(need.bytes for need in found if need.device == "cpu"), available_memory()
    remedy = "lower training.micro_batch_tokens or generation.slots, or set training.gradient_checkpointing"
    yield check("all services", total <= there, f"about {size_text(total)} of {size_text(there)} available", remedy)
    yield shared_memory_check(shared_memory(config, shape))
