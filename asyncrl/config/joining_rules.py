"""Rules about workers that join a run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


def joining_problems(config: "Config") -> Iterator[Problem]:
    """Yields what is wrong about workers that join."""
    fleet, replicas = config.fleet, _replicas(config)
    if bool(fleet.listen) != bool(fleet.joined):
        missing, present = ("fleet.joined", "fleet.listen") if fleet.listen else ("fleet.listen", "fleet.joined")
        text = "fleet.listen is where workers join, and fleet.joined says which: write both or none"
        yield Problem(missing, "", text, (present,))
    for service, needed in fleet.joined.items():
        if service not in replicas:
            known = ", ".join(sorted(replicas))
            text = f"no {service} workers may join; those of this experiment that may are {known}"
            yield Problem("fleet.joined", "", text)
        elif needed > replicas[service]:
            key = f"{'evaluate' if service == 'evaluation' else service}.replicas"
            text = f"{needed} {service} workers are to join, and there are {replicas[service]}: raise {key}"
            yield Problem("fleet.joined", "", text, (key,))
    if fleet.joined and fleet.wire != "tcp":
        text = 'workers that join reach the others over a network: write fleet.wire = "tcp"'
        yield Problem("fleet.wire", "", text, ("fleet.joined",))
    if not {"generation", "evaluation"}.isdisjoint(fleet.joined) and config.generation.engine == "vllm":
        text = "vLLM takes new weights from the shared memory of the trainer's host: its workers cannot join yet"
        yield Problem("fleet.joined", "", text, ("generation.engine",))
    if "reward" in fleet.joined and config.feedback.asks:
        text = "the reward worker serves the page on which people rate, on the host of the controller: it cannot join"
        yield Problem("fleet.joined", "", text, ("feedback.ask",))


def _replicas(config: "Config") -> dict[str, int]:
    """Returns the services of an experiment whose workers may join, with their replicas. Trainer and critics write
    checkpoints into the run directory, and stay with the controller."""
    found = {"generation": config.generation.replicas, "reward": config.reward.replicas}
    if config.evaluate.prompts:
        found["evaluation"] = config.evaluate.replicas
    if config.reference_by_service:
        found["reference"] = config.reference.replicas
    if config.algorithm.constraint == "lagrangian":
        found["cost"] = config.cost.replicas
    if config.environment.use:
        found["environment"] = config.environment.replicas
    return found
