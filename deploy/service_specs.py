"""Specifies the services that an experiment needs, with their implementations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncrl.config.placement import Placement, rank_layout
from asyncrl.config.schema import Config, CriticConfig, Scorer
from asyncrl.config.sections.device_pools import CPU, Device, DevicePlace
from asyncrl.engines.ranks.rank_limits import sampling_ranks
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.fleet.worker.worker_spec import Origin
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import (
    Critic,
    Environment,
    Generation,
    GroupReward,
    Reference,
    Reward,
    TokenReward,
    Training,
)
from asyncrl.rewards.execution.scoring import stores_token_rewards


def service_specs(config: Config) -> list[ServiceSpec]:
    """Returns the services of a training run."""
    if config.acting.env:
        return _acting_specs(config)
    layout = _layout_of_trainer(config)
    specs = [
        generation_spec(config, "generation", replicas=config.generation_replicas, **_inside_trainer(config)),
        reward_spec(config, "reward"),
        ServiceSpec("training", Training, "asyncrl.services.training:TrainingService", layout=layout, origin="torch"),
    ]
    if config.environment.use:
        specs.append(environment_spec(config))
    if config.reference_by_service:
        implementation = "asyncrl.services.reference:ReferenceService"
        replicas = config.reference.replicas
        ranks = rank_layout(config.reference.layout)
        specs.append(
            ServiceSpec("reference", Reference, implementation, replicas=replicas, layout=ranks, origin="torch")
        )
    if config.algorithm.advantage == "gae":
        specs.append(_critic_spec("critic", config.critic))
    if config.algorithm.constraint == "lagrangian":
        specs += [reward_spec(config, "cost"), _critic_spec("cost_critic", config.cost_critic)]
    if config.evaluate.is_on:
        specs.append(generation_spec(config, "evaluation", replicas=config.evaluate.replicas))
    places = Placement.of(config).pooled
    return [replace(spec, devices=_devices(spec, places.get(spec.inside or spec.name, ()))) for spec in specs]


def _layout_of_trainer(config: Config) -> Layout:
    """Returns the layout of the trainer's ranks. Where they sample too, its sizes in generation tell what each rank
    gathers."""
    generation = config.generation
    if generation.colocate == "none":
        return rank_layout(config.training.layout)
    return rank_layout(config.training.layout, generation.layout)


def _inside_trainer(config: Config) -> dict[str, Any]:
    """Returns what a spec of generation says about the trainer's ranks that sample; nothing where none do."""
    if not (ranks := sampling_ranks(config)):
        return {}
    # The first rank of a group answers for it, whatever its stage, as among tensor ranks.
    layout = Layout(tp=config.generation.layout.size)
    return {"inside": "training", "inside_ranks": ranks, "layout": layout, "scales": False}


def _acting_specs(config: Config) -> list[ServiceSpec]:
    """Returns the services of a policy that acts: the environments reward it, so there is no reward service."""
    acting = "asyncrl.services.acting:ActingService"
    training = "asyncrl.services.training:ActingTrainingService"
    return [
        ServiceSpec("generation", Generation, acting, replicas=config.generation.replicas, origin="torch"),
        ServiceSpec("training", Training, training, origin="torch"),
        *([acting_evaluation_spec()] if config.evaluate.episodes else []),
    ]


def acting_evaluation_spec(**options: Any) -> ServiceSpec:
    """Returns the spec of the worker that plays the episodes of an evaluation."""
    implementation = "asyncrl.services.acting:ActingEvaluationService"
    return ServiceSpec("evaluation", Generation, implementation, origin="torch", scales=False, options=options)


def device_of(config: Config, spec: ServiceSpec) -> Device:
    """Returns the device that the config names for the workers of a service; the CPU for those without torch."""
    name = "generation" if spec.name == "evaluation" else spec.name
    return CPU if spec.origin == "plain" else Device(getattr(config, name).device)


def _devices(spec: ServiceSpec, places: Sequence[tuple[DevicePlace, ...]]) -> list[tuple[str, ...]]:
    """Returns the GPUs of each worker of a service, of the places of all workers of its pool; none where all are on the
    CPU."""
    inside = [places[rank] for ranks in spec.inside_ranks for rank in ranks] if places else []
    workers = inside or places
    return [tuple(place.device for place in each) for each in workers if all(place.device != CPU for place in each)]


def generation_spec(config: Config, name: str, **fields: Any) -> ServiceSpec:
    """Returns the spec of a generation service. Other engines than our own start threads as they are imported, so their
    workers are spawned."""
    origin: Origin = "torch" if config.generation.engine_facts.is_own else "spawn"
    return ServiceSpec(name, Generation, "asyncrl.services.generation:GenerationService", origin=origin, **fields)


def environment_spec(config: Config) -> ServiceSpec:
    implementation = "asyncrl.services.environment:EnvironmentService"
    return ServiceSpec("environment", Environment, implementation, replicas=config.environment.replicas)


def reward_spec(config: Config, service: Scorer) -> ServiceSpec:
    """Returns the spec of a scoring service; a service without a model does not load torch."""
    section = config.scorers[service]
    held_out = [function for each in config.evaluate.held_out for function in each.functions]
    functions = [*section.functions, *(held_out if service == "reward" else ())]
    contract = GroupReward if any(function.group for function in functions) else Reward
    if service == "reward" and stores_token_rewards(config):
        contract = TokenReward
    if service == "reward" and config.feedback.asks:
        return _feedback_spec(config, contract)
    if section.model:
        implementation = "asyncrl.services.reward_model:RewardModelService"
        ranks = rank_layout(section.layout)
        return ServiceSpec(service, contract, implementation, replicas=section.replicas, layout=ranks, origin="torch")
    return ServiceSpec(service, contract, "asyncrl.services.reward:RewardService", replicas=section.replicas)


def _feedback_spec(config: Config, contract: type[Reward]) -> ServiceSpec:
    """Returns the spec of the reward service that asks a person too."""
    if config.reward.model:
        implementation = "asyncrl.services.reward_model:FeedbackWithModelService"
        return ServiceSpec("reward", contract, implementation, origin="torch", scales=False)
    return ServiceSpec("reward", contract, "asyncrl.services.feedback:FeedbackService", scales=False)


def _critic_spec(name: str, critic: CriticConfig) -> ServiceSpec:
    implementation = "asyncrl.services.critic:CriticService"
    return ServiceSpec(name, Critic, implementation, layout=rank_layout(critic.layout), origin="torch")


def worker_count(config: Config) -> int:
    """Returns the number of worker processes of a training run."""
    return sum(spec.replicas * spec.layout.size for spec in service_specs(config) if not spec.inside)
