"""Specifies the services that an experiment needs, with their implementations."""

from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import Config, Scorer
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.fleet.worker.worker_spec import Origin
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.service_contracts import Critic, Generation, Reference, Reward, Training

ENGINES: Mapping[str, Origin] = {"torch": "torch"}
"""The process that workers with an engine may be forked from. An engine that starts threads or uses a GPU when it is
imported says "spawn" here, so that it need not be imported to know that."""


def service_specs(config: Config) -> list[ServiceSpec]:
    """Returns the services of a training run."""
    layout, origin = Layout(dp=config.training.layout_dp), ENGINES[config.training.engine]
    specs = [
        generation_spec(config, "generation", replicas=config.generation.replicas),
        reward_spec(config, "reward"),
        ServiceSpec("training", Training, "asyncrl.services.training:TrainingService", layout=layout, origin=origin),
    ]
    if config.algorithm.kl > 0:
        implementation, replicas = "asyncrl.services.reference:ReferenceService", config.reference.replicas
        specs.append(ServiceSpec("reference", Reference, implementation, replicas=replicas, origin="torch"))
    if config.algorithm.advantage == "gae":
        specs.append(_critic_spec("critic"))
    if config.algorithm.constraint == "lagrangian":
        specs += [reward_spec(config, "cost"), _critic_spec("cost_critic")]
    if config.evaluate.prompts:
        specs.append(generation_spec(config, "evaluation"))
    return specs


def generation_spec(config: Config, name: str, **fields: Any) -> ServiceSpec:
    implementation, origin = "asyncrl.services.generation:GenerationService", ENGINES[config.generation.engine]
    return ServiceSpec(name, Generation, implementation, origin=origin, **fields)


def reward_spec(config: Config, service: Scorer) -> ServiceSpec:
    """Returns the spec of a scoring service; a service without a model does not load torch."""
    if config.scorers[service].model:
        return ServiceSpec(service, Reward, "asyncrl.services.reward_model:RewardModelService", origin="torch")
    return ServiceSpec(service, Reward, "asyncrl.services.reward:RewardService")


def _critic_spec(name: str) -> ServiceSpec:
    return ServiceSpec(name, Critic, "asyncrl.services.critic:CriticService", origin="torch")


def worker_count(config: Config) -> int:
    """Returns the number of worker processes of a training run."""
    return sum(spec.replicas * spec.layout.size for spec in service_specs(config))
