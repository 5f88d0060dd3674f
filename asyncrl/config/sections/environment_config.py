"""The sections `[environment]`, which answers a language model, and `[acting]`, in which a small network acts."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.config.sections.algorithm_config import Positive, PositiveFloat, Section
from asyncrl.config.sections.secret import Options

Share = Annotated[float, Field(ge=0, le=1)]
Activation = Literal["tanh", "relu", "gelu", "silu", "elu", "leaky_relu"]


class EnvironmentConfig(Section):
    """The environment that answers the policy, for samples of several turns."""

    use: str = ""
    """Environment: a built-in name, `FILE.py:Class`, `tools`, `agent:COMMAND`, or a name behind `gymnasium:`,
    `textarena:`, `mcp:`, `openenv:` or `verifiers:`. Default: none, each sample is one answer."""
    options: Options = Field(default={})
    """Keyword arguments of the environment."""
    max_turns: Positive = 8
    """Largest number of turns of the policy in an episode."""
    max_tokens: Positive = 1024
    """Largest number of tokens of an episode after its prompt, observations included."""
    max_seconds: PositiveFloat = 600.0
    """Seconds of the environment in one episode, which then ends with `time_limit`."""
    max_bytes: Positive = 16384
    """Largest size of an observation in UTF-8 bytes; the rest is cut off."""
    deadline: PositiveFloat = 10.0
    """Seconds of one call of `reset` or `step`."""
    on_error: Literal["fail", "zero", "ignore"] = "fail"
    """Effect of an environment that fails: the run ends (fail), the episode ends with 0 for that turn (zero), or the
    sample leaves baseline and loss (ignore)."""
    thoughts: Literal["keep", "template"] = "keep"
    """Treatment of earlier thoughts that the chat template drops: they stay in the context (keep), or each turn is
    rendered anew (template), where a new context may begin and count towards max_tokens."""
    replicas: Positive = 1
    """Number of environment workers."""
    pool: str = ""
    """Pool of these workers."""
    workers: Positive = 1
    """Child processes of each replica, which play many episodes each."""


class ActingConfig(Section):
    """A policy that acts in an environment of Gymnasium, in place of a language model. A sample is transitions of one
    environment, a group those of all environments of an acting worker, of which there are `generation.replicas`."""

    env: str = ""
    """Environment: a name of Gymnasium, `module:NAME-v0`, or `FILE.py:function` or `module:function` that makes one.
    Default: none."""
    options: Options = Field(default={})
    """Keyword arguments of the environment."""
    algorithm: Literal["ppo", "sac"] = "ppo"
    """Algorithm: `ppo` for any space of actions, `sac` for boxes of numbers, with a replay."""
    hidden_size: tuple[Positive, ...] = (64, 64)
    """Widths of the hidden layers of the policy and of its critics."""
    activation: Activation = "tanh"
    """Activation between layers."""
    environments: Positive = 8
    """Number of environments of each acting worker, and of samples in a group."""
    transitions: Positive = 32
    """Number of transitions of each environment in one sample; episodes go on in the next one."""
    children: Positive = 1
    """Number of child processes of each acting worker."""
    feedback: Literal["synchronous", "asynchronous"] = "synchronous"
    """Order of steps: in all environments of a worker once all have answered, or in each that has (asynchronous)."""
    deadline: PositiveFloat = 10.0
    """Seconds of `reset` or `step`. An environment that takes longer, raises or dies loses its episode."""
    failures: Positive = 100
    """Lost episodes of a worker in a row after which the run ends."""
    gamma: Share = 0.99
    """Discount of rewards per step of the environment."""
    gae_lambda: Share = 0.95
    """Lambda of generalized advantage estimation, with PPO."""
    clip_range: PositiveFloat = 0.2
    """Distance of the ratio from 1 at which PPO clips it."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the mean entropy in the loss of PPO."""
    value_coefficient: Annotated[float, Field(ge=0)] = 1.0
    """Coefficient of PPO's value loss, half the mean squared error."""
    epochs: Positive = 10
    """Number of passes of PPO over the transitions of a step."""
    minibatch: Positive = 256
    """Number of transitions in one update."""
    replay: Literal["uniform", "prioritised"] = "uniform"
    """Draws of SAC from its replay: uniform, or by the error of the critics (arXiv 1511.05952)."""
    replay_size: Positive = 100_000
    """Largest number of transitions in the replay."""
    replay_max_age: Annotated[int, Field(ge=0)] = 0
    """Largest age of drawn transitions in versions; 0: no bound."""
    warm_up: Annotated[int, Field(ge=0)] = 1000
    """Number of first transitions of SAC, with random actions and no updates."""
    updates_per_transition: PositiveFloat = 1.0
    """Number of updates of SAC for each new transition."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Step of the target critics of SAC towards its critics."""


NETWORK = "acting"
"""Value of model.name and task.prompts where the policy is a network that acts: it has neither."""
LEARNING_RATE = 3e-4
"""Default of training.learning_rate there."""

LANGUAGE_GUARDS = ("guards.no_signal", "guards.no_variance", "guards.no_movement", "guards.truncation")
"""Guards that are off there: they tell of prompts, answers and log-probs of tokens."""
SAC_DEFAULTS: Mapping[str, Any] = {
    "acting.transitions": 8,
    "acting.hidden_size": (256, 256),
    "acting.activation": "relu",
    "staleness.policy": "admit",
    "training.max_grad_norm": 1e6,
    "guards.collapse": "off",
}
"""Other defaults with SAC: the network of its paper; short steps, because each transition has an update; no bound on
age, because its losses hold for transitions of any policy; and none on gradients, as in the paper: those of the critics
grow with the rewards, and the bound of language models would cut all of them. Its entropy is that of a density,
which is trained to keep a target below 0, so that its fall tells nothing."""


def acting_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values of other keys that follow from `acting.env`, to be overridden by those that are written. given:
    keys of the section that are written."""
    if not given.get("env"):
        return {}
    environments = given.get("environments", ActingConfig.model_fields["environments"].default)
    learner = SAC_DEFAULTS if str(given.get("algorithm")) == "sac" else {}
    own = {"model.name": NETWORK, "task.prompts": NETWORK, "task.samples_per_prompt": environments}
    return {
        **own,
        **learner,
        **dict.fromkeys(LANGUAGE_GUARDS, "off"),
        "task.prompts_per_step": 1,
        "algorithm.preset": "ppo",
        "training.learning_rate": LEARNING_RATE,
    }
