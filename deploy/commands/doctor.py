"""asyncrl doctor: check what this machine can run, and what an experiment needs."""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.deploy.machine import (
    Check,
    available_memory,
    check,
    device_checks,
    machine_checks,
    shared_memory_check,
    usable_cores,
)
from asyncrl.errors import ConfigError
from asyncrl.installing import program

if TYPE_CHECKING:
    from asyncrl.config import Config


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("asyncrl doctor", description=__doc__, epilog="exit status 1: something is BAD")
    parser.add_argument("target", nargs="?", metavar="NAME|FILE", help="an experiment: what it needs is checked too")
    asked, flags = parser.parse_known_args(arguments)
    bad = 0
    for found in checks(asked.target, flags):
        print(found, flush=True)
        bad += found.verdict == "bad"
    command = shlex.join(["run", asked.target or "quickstart", *flags])
    print(f"\n{bad} to repair" if bad else f"\nready: {program()} {command}")
    return 1 if bad else 0


def checks(target: str | None, flags: list[str]) -> Iterator[Check]:
    yield from machine_checks()
    if target is not None:
        yield from experiment_checks(target, flags)


def experiment_checks(target: str, flags: list[str]) -> Iterator[Check]:
    """What one experiment needs, as far as this install can read it."""
    try:
        from asyncrl.settings import load

        config = load(target, flags).config
    except ImportError as error:
        yield Check(target, "bad", f"cannot be read: {error}", "install what is missing above, then ask again")
        return
    except ConfigError as error:
        yield Check(target, "bad", str(error).replace("\n", f"\n{'':26}"), "correct it, then ask again")
        return
    yield Check(target, "ok", f"{config.steps} steps of {config.task.prompts_per_step} prompts")
    yield from _part_checks(config)
    yield from _page_checks(config)
    yield from _reward_checks(config)
    yield _workers_check(config)
    yield from device_checks(_devices(config))
    yield from _model_checks(config)
    yield from _memory_checks(config)


def _devices(config: "Config") -> dict[str, str]:
    found = {"generation.device": config.generation.device, "training.device": config.training.device}
    found |= {"reference.device": config.reference.device} if config.algorithm.kl > 0 else {}
    found |= {"reward.device": config.reward.device} if config.reward.model else {}
    found |= {"critic.device": config.critic.device} if config.algorithm.advantage == "gae" else {}
    if config.algorithm.constraint == "lagrangian":
        found |= {"cost.device": config.cost.device} if config.cost.model else {}
        found |= {"cost_critic.device": config.cost_critic.device}
    return found


def _model_checks(config: "Config") -> Iterator[Check]:
    from asyncrl.model_files import damages

    judges = (config.critic, config.reward, config.cost, config.cost_critic)
    for name in filter(None, (config.model.name, *(judge.model for judge in judges))):
        for damage in damages(Path(name).expanduser()):
            yield Check("model", "bad", damage, "get it again: copy or download the model once more")


def _part_checks(config: "Config") -> Iterator[Check]:
    from asyncrl.parts import missing_parts

    for line in missing_parts(config):
        missing, _, install = line.partition("; run: ")
        yield Check("missing", "bad", missing, install)


def _page_checks(config: "Config") -> Iterator[Check]:
    from asyncrl.algorithms.choice import page_mistakes

    for mistake in page_mistakes(config):
        yield Check("page", "bad", mistake, "correct it, then ask again")


def _reward_checks(config: "Config") -> Iterator[Check]:
    from asyncrl.rewards.functions import check_functions

    for mistake in check_functions(config) + check_functions(config, "cost"):
        yield Check("rewards", "bad", mistake, "correct it, then ask again")


def _workers_check(config: "Config") -> Check:
    from asyncrl.deploy.services import service_specs

    specs = service_specs(config, evaluation=bool(config.evaluate.prompts))
    workers = sum(spec.replicas * spec.layout.size for spec in specs)
    threads = workers * config.fleet.threads
    critics = (config.algorithm.advantage == "gae") + (config.algorithm.constraint == "lagrangian")
    learners = config.training.layout_dp + critics
    busiest = (config.generation.replicas + learners) * config.fleet.threads
    found = f"{workers} with {config.fleet.threads} torch threads each, {usable_cores():g} cores"
    if busiest <= usable_cores() or threads == workers:
        return Check("workers", "ok", found)
    return Check("workers", "note", found, "they will slow each other down: lower fleet.threads or generation.replicas")


def _memory_checks(config: "Config") -> Iterator[Check]:
    from asyncrl.deploy.footprint import needs, shape_of, shared_memory, size_text

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
