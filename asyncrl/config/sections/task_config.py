"""The sections of what there is to learn: `[task]`, its prompts and the size of a batch; `[environment]`; and
`[acting]`."""

from collections.abc import Mapping
from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from asyncrl.config.sections.algorithm_config import MayChange, Positive, PositiveFloat, Section
from asyncrl.config.sections.named_values import Named
from asyncrl.config.sections.secret import Options

IN_MEMORY = "python:rows"
"""The value of `task.prompts` in a run whose prompts were given as Python objects."""
DECIDED = {"messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict"}
"""Arguments of apply_chat_template that asyncrl decides."""
CLOCK = "asyncrl_clock"
"""Argument of chat templates in place of the clock."""
_ALONE = "aAwdbBmyYHIMSfpzZjUWVcxXGueDFT"
DIRECTIVES = (*_ALONE, *(f"-{each}" for each in _ALONE), "%")


class MixedSource(Section):
    """One entry of task.prompts where that is a list."""

    use: str
    """Source of rows, in a form of task.prompts that is no list."""
    weight: Annotated[float, Field(ge=0)] = 0.0
    """Share of groups of this source, relative to the other weights; without any, all rows are drawn equally often."""
    columns: dict[str, str] = Field(default={})
    """Columns of this source, beside those of task.columns."""
    options: Options = Field(default={})
    """Keyword arguments of this source, beside those of task.options."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_short_for_use(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value


def _all_or_none_weighted(sources: tuple[MixedSource, ...]) -> tuple[MixedSource, ...]:
    """Refuses weights of some sources only: the others would never be drawn."""
    lacking = [each.use for each in sources if not each.weight]
    if lacking and len(lacking) < len(sources):
        raise ValueError(f"{' and '.join(lacking)} has no weight, and others have one: write a weight over 0 for each")
    return sources


def _own_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Refuses arguments that asyncrl gives the chat template."""
    if decided := sorted(set(given) & DECIDED):
        raise ValueError(f"asyncrl gives the chat template its {' and '.join(decided)}: remove it here")
    return given


def _date(given: str) -> str:
    """Refuses what is no date."""
    try:
        return given and date.fromisoformat(given).isoformat()
    except ValueError:
        raise ValueError(f"{given} is no date: write one such as 2026-11-28") from None


SOURCE = "a source"
SOURCES = "sources"
"""Names of the two forms of task.prompts, which pydantic puts into the location of a mistake."""
Sources = Annotated[tuple[MixedSource, ...], Field(min_length=1)]
SourceOrSources = Annotated[
    Annotated[str, Tag(SOURCE)] | Annotated[Sources, AfterValidator(_all_or_none_weighted), Tag(SOURCES)],
    Discriminator(lambda value: SOURCES if isinstance(value, list | tuple) else SOURCE),
]


class TaskConfig(Section):
    """The prompts to train on, and the size of a batch."""

    prompts: Annotated[SourceOrSources, Named.ROWS]
    """Source of the prompts: a JSONL, JSON, CSV (also .gz) or Parquet file, a folder of such files (FOLDER,
    FOLDER#SPLIT), `hub:NAME[:CONFIG][#SPLIT]`, `reasoning_gym:NAME`, `FILE.py:function` or `module:function`; or a list
    of sources, each also as a table."""
    columns: dict[str, str] = Field(default={})
    """Columns by the names that rewards give them: { prompt = "question" }. A dot leads into nested columns; "" leaves
    a column out."""
    options: Options = Field(default={})
    """Arguments of a procedural source, such as { max_terms = 3 }, or of datasets.load_dataset."""
    epochs: MayChange[Positive | None] = None
    """Number of passes over the rows, in place of `steps`; rows of dropped groups count too."""
    shuffle: bool = True
    """Draws the rows of each epoch in another order."""
    curriculum: Annotated[str, Named.CODE] = ""
    """Function FILE.py:NAME or module:NAME of a step, from 0, that returns the weights of the sources."""
    prompts_per_step: Positive = 8
    """Number of prompts, and so of groups, in one training step (B)."""
    samples_per_prompt: Positive = 8
    """Number of samples of each prompt (G)."""
    system: str = ""
    """System message before every prompt; prompts that are text become chat messages."""
    text_prompts: Literal["raw", "chat"] = "raw"
    """Treatment of text prompts of a model with a chat template: as they are (raw), or as a message of the user
    (chat)."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_own_arguments)] = Field(default={})
    """Further arguments of the chat template, such as { enable_thinking = false }."""
    date: Annotated[str, AfterValidator(_date)] = ""
    """Date for chat templates, such as "2026-11-28"; default: that of the run's first start."""
    size: Positive = 1000
    """Rows that a procedural source makes, or that are read of a stream."""
    max_prompt_tokens: Positive = 512
    """Largest number of tokens of a prompt."""
    max_picture_pixels: Positive = 1280 * 28 * 28
    """Largest number of pixels of a picture; a larger one ends the run."""
    long_prompts: Literal["error", "skip", "truncate"] = "error"
    """Treatment of longer prompts: an error before sampling, `skip`, or `truncate` the beginning of their longest
    message."""
    pretrain: Annotated[str, Named.ROWS] = ""
    """Texts for algorithm.pretrain_coefficient: rows of `text`, or of `prompt` and `answer`, from a source as in
    `prompts`, without `columns` and `options`."""
    pretrain_per_step: Positive = 32
    """Number of these texts in one step."""

    @property
    def template_clock(self) -> dict[str, dict[str, str]]:
        """Returns the argument of `with_clock` templates: what each directive of strftime gives at the beginning of
        `date`."""
        now = datetime.fromisoformat(self.date) if self.date else datetime.now()
        return {CLOCK: {f"%{each}": now.strftime(f"%{each}") for each in DIRECTIVES}}

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Returns the arguments of the policy's chat template besides messages and tools."""
        return {**self.template_clock, **self.chat_template_kwargs}

    @property
    def sources(self) -> tuple[MixedSource, ...]:
        """Returns the sources of the prompts; a single one as a list of one."""
        return (MixedSource(use=self.prompts),) if isinstance(self.prompts, str) else self.prompts


# The sections `[environment]`, which answers a language model, and `[acting]`, in which a small network acts.


Share = Annotated[float, Field(ge=0, le=1)]
Activation = Literal["tanh", "relu", "gelu", "silu", "elu", "leaky_relu"]


class EnvironmentConfig(Section):
    """The environment that answers the policy, for samples of several turns."""

    use: Annotated[str, Named.ENVIRONMENT] = ""
    """Environment: a built-in name, `FILE.py:Class`, `tools`, `agent:COMMAND`, or a name behind `gymnasium:`,
    `textarena:`, `mcp:`, `openenv:` or `verifiers:`. Default: none, each sample is one answer."""
    options: Annotated[Options, Named.TOOLS] = Field(default={})
    """Keyword arguments of the environment."""
    max_turns: Positive = 8
    """Largest number of turns of the policy in an episode."""
    max_tokens: Positive = 1024
    """Most tokens of an episode after its prompt, observations included."""
    max_seconds: PositiveFloat = 600.0
    """Seconds of the environment in one episode, which then ends with `time_limit`."""
    max_bytes: Positive = 16384
    """Most UTF-8 bytes of an observation; the rest is cut off."""
    deadline: PositiveFloat = 10.0
    """Seconds of one call of `reset` or `step`."""
    on_error: Literal["fail", "zero", "ignore"] = "fail"
    """Effect of a failure: the run ends (fail), the episode ends with 0 for that turn (zero), or the sample leaves
    baseline and loss (ignore)."""
    thoughts: Literal["keep", "template"] = "keep"
    """Treatment of earlier thoughts that the chat template drops: they stay in the context (keep), or each turn is
    rendered anew (template), where a new context may begin and count towards max_tokens."""
    replicas: Positive = 1
    """Number of environment workers."""
    pool: MayChange[str] = ""
    """Pool of these workers."""
    workers: Positive = 1
    """Child processes of each replica, which play many episodes each."""


class ActingConfig(Section):
    """A policy that acts in an environment of Gymnasium, in place of a language model. A sample is transitions of one
    environment, a group those of all environments of an acting worker, of which there are `generation.replicas`."""

    env: Annotated[str, Named.CODE] = ""
    """Environment: a name of Gymnasium, `module:NAME-v0`, or a `FILE.py:function` or `module:function` that makes
    one."""
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
    children: MayChange[Positive] = 1
    """Number of child processes of each acting worker."""
    feedback: MayChange[Literal["synchronous", "asynchronous"]] = "synchronous"
    """Order of steps: in all environments of a worker once all have answered, or in each that has (asynchronous)."""
    deadline: MayChange[PositiveFloat] = 10.0
    """Seconds of `reset` or `step`, after which an environment loses its episode."""
    failures: MayChange[Positive] = 100
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
