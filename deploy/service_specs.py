"""Which services an experiment needs, and what implements them."""

from asyncrl.config import Config
from asyncrl.fleet import ServiceSpec
from asyncrl.protocols.contracts import Critic, Generation, Reference, Reward, Training
from asyncrl.protocols.layout import Layout
from asyncrl.rewards.functions import Judge, section_of

GENERATION = "asyncrl.services.generation:GenerationService"
CRITIC = "asyncrl.services.critic:CriticService"


def service_specs(config: Config, *, evaluation: bool) -> list[ServiceSpec]:
    """The services of a training run."""
    specs = [
        ServiceSpec("generation", Generation, GENERATION, replicas=config.generation.replicas),
        reward_spec(config, "reward"),
        ServiceSpec(
            "training",
            Training,
            "asyncrl.services.training:TrainingService",
            layout=Layout(dp=config.training.layout_dp),
        ),
    ]
    if config.algorithm.kl > 0:
        implementation = "asyncrl.services.reference:ReferenceService"
        specs.append(ServiceSpec("reference", Reference, implementation, replicas=config.reference.replicas))
    if config.algorithm.advantage == "gae":
        specs.append(ServiceSpec("critic", Critic, CRITIC))
    if config.algorithm.constraint == "lagrangian":
        specs += [reward_spec(config, "cost"), ServiceSpec("cost_critic", Critic, CRITIC)]
    if evaluation:
        specs.append(ServiceSpec("evaluation", Generation, GENERATION))
    return specs


def reward_spec(config: Config, service: Judge) -> ServiceSpec:
    """With a model, or without one, and then without torch."""
    with_model = "asyncrl.services.reward_model:RewardModelService"
    implementation = with_model if section_of(config, service).model else "asyncrl.services.reward:RewardService"
    return ServiceSpec(service, Reward, implementation)
