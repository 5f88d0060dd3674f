"""Specifies the services that an experiment needs, with their implementations."""

from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.fleet.worker.worker_spec import Origin
from asyncrl.protocols.contracts import Critic, Generation, Reference, Reward, Training
from asyncrl.protocols.layout import Layout
from asyncrl.rewards.functions import Scorer, section_of

GENERATION = "asyncrl.services.generation:GenerationService"
CRITIC = "asyncrl.services.critic:CriticService"

ENGINES: Mapping[str, Origin] = {"torch": "torch"}
"""The process that workers with an engine may be forked from. An engine that starts threads or uses a GPU when it is
imported says "spawn" here, where nobody has to import it to know."""


def service_specs(config: Config, *, evaluation: bool) -> list[ServiceSpec]:
    """Returns the services of a training run."""
    specs = [
        generation_spec(config, "generation", replicas=config.generation.replicas),
        reward_spec(config, "reward"),
        ServiceSpec(
            "training",
            Training,
            "asyncrl.services.training:TrainingService",
            layout=Layout(dp=config.training.layout_dp),
            origin=ENGINES[config.training.engine],
        ),
    ]
    if config.algorithm.kl > 0:
        implementation = "asyncrl.services.reference:ReferenceService"
        replicas = config.reference.replicas
        specs.append(ServiceSpec("reference", Reference, implementation, replicas=replicas, origin="torch"))
    if config.algorithm.advantage == "gae":
        specs.append(ServiceSpec("critic", Critic, CRITIC, origin="torch"))
    if config.algorithm.constraint == "lagrangian":
        specs += [reward_spec(config, "cost"), ServiceSpec("cost_critic", Critic, CRITIC, origin="torch")]
    if evaluation:
        specs.append(generation_spec(config, "evaluation"))
    return specs


def generation_spec(config: Config, name: str, **fields: Any) -> ServiceSpec:
    return ServiceSpec(name, Generation, GENERATION, origin=ENGINES[config.generation.engine], **fields)


def worker_count(config: Config) -> int:
    """Returns the number of worker processes of a training run."""
    specs = service_specs(config, evaluation=bool(config.evaluate.prompts))
    return sum(spec.replicas * spec.layout.size for spec in specs)


def reward_spec(config: Config, service: Scorer) -> ServiceSpec:
    """Returns the spec of a scoring service; a service without a model does not load torch."""
    if section_of(config, service).model:
        return ServiceSpec(service, Reward, "asyncrl.services.reward_model:RewardModelService", origin="torch")
    return ServiceSpec(service, Reward, "asyncrl.services.reward:RewardService")
