"""The config of an experiment as frozen models, without torch. Sources: command line > environment > file > default.
The text below a key is what `asyncrl keys`, error messages and docs/reference/config.md say about it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncrl.config.problems import Incoherent, Problem
from asyncrl.config.rules_between_keys import rule_problems
from asyncrl.config.sections.algorithm_config import AlgorithmConfig as AlgorithmConfig
from asyncrl.config.sections.algorithm_config import NonEmpty, Positive, PositiveFloat, Section
from asyncrl.config.sections.children_config import ChildrenConfig
from asyncrl.config.sections.environment_config import ActingConfig, EnvironmentConfig
from asyncrl.config.sections.evaluate_config import EvaluateConfig
from asyncrl.config.sections.feedback_config import FeedbackConfig
from asyncrl.config.sections.fleet_config import FleetConfig as FleetConfig
from asyncrl.config.sections.model_config import ModelConfig as ModelConfig
from asyncrl.config.sections.model_config import WeightsConfig
from asyncrl.config.sections.pools_config import PoolConfig
from asyncrl.config.sections.reward_function import RewardFunction as RewardFunction
from asyncrl.config.sections.secret import Options
from asyncrl.config.sections.task_config import IN_MEMORY as IN_MEMORY
from asyncrl.config.sections.task_config import TaskConfig as TaskConfig
from asyncrl.config.sections.telemetry_config import TelemetryConfig
from asyncrl.config.sections.training.layout_config import GenerationLayoutConfig, LayoutConfig
from asyncrl.config.sections.training.training_config import TrainingConfig as TrainingConfig
from asyncrl.config.service_placement import place_services

Scorer = Literal["reward", "cost"]
"""The services that score samples. Each has a section of the config with its name."""


class GenerationConfig(Section):
    """Sampling of answers."""

    engine: Literal["torch", "vllm"] = "torch"
    """Engine that samples: asyncrl's own, `torch`, or vLLM, which has to be installed."""
    vllm: Options = Field(default={})
    """Further arguments of vLLM's AsyncEngineArgs, e.g. { enforce_eager = false }."""
    layout_tp: Positive = 1
    """Number of processes that share each layer of one replica (tensor parallel). Only vLLM can have several."""
    replicas: Positive = 1
    """Number of generation workers, each with its own copy of the model."""
    colocate: Literal["none", "training", "halves"] = "none"
    """Processes that sample. `none`: generation workers. `training`: the trainer's ranks, between two steps, with the
    model that they gather from each other. It needs staleness.limit = 0. `halves`: the trainer's ranks take turns; one
    half trains a batch while the other samples the next. It needs staleness.admission = "lockstep"."""
    layout: GenerationLayoutConfig = GenerationLayoutConfig()
    """Groups in which the trainer's ranks sample, with colocate = "training": { pp = 1, tp = 1 }; each rank has 1/tp
    of 1/pp of the layers, and of the keys and values. 1: each has the whole model. Both divide those of
    training.layout."""
    grouping: Literal["zero-redundancy", "vanilla"] = "zero-redundancy"
    """Choice of the ranks that sample together, and of what each gathers. `zero-redundancy`: those whose slices in
    training are a part of what they sample with, which is held once. `vanilla`: consecutive ranks, which gather the
    whole model and hold their slices in training beside what they sample with, for comparison."""
    slots: Positive = 32
    """Number of sequences that one replica decodes together."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest probability that the tokens which may be sampled have together; 1: all tokens may be sampled. This and
    the next two count after the temperature, first min_p, then top_k. Log-probs are those of the tokens left."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of the likeliest tokens that may be sampled; 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Least probability of a token that may be sampled, as a share of that of the likeliest one."""
    max_new_tokens: Positive = 64
    """Largest number of tokens of an answer."""
    stop: tuple[NonEmpty, ...] = ()
    """Strings that end an answer. Rewards see the text before them."""
    kv: Literal["keep", "recompute"] = "keep"
    """Keys and values of running samples after new weights: `keep` goes on with the old ones, `recompute` does not."""
    cache_gb: Annotated[float, Field(ge=0)] = 0.0
    """Most GB (10^9 bytes) of keys and values of a replica; samples are preempted to fit. 0: all slots fit."""
    prefill_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of prompts that a step computes beside a full batch of samples. 0 chooses 32 on a CPU, else 2048."""
    deterministic: bool = False
    """Makes tokens and log-probs independent of slots, neighbours and order of arrival, bit for bit. This is slower.
    Models with experts are refused."""
    device: str = "cpu"
    """Device of the generation workers, e.g. cpu or cuda:0."""
    pool: str = ""
    """Pool of the generation workers, a table of `pools`, which has their devices; `device` is then not read."""
    stored_samples: str = ""
    """Parquet file of samples (`asyncrl samples RUN_DIR --parquet FILE`) that are trained instead of sampled ones."""
    deadline: PositiveFloat = 600.0
    """Most seconds that the engine spends on one sample, which is then cut off with the finish reason `length`. Time in
    the queue does not count."""


MODEL_TERM = "model"
"""Name of the reward term of `reward.model` or `cost.model`."""


class RewardConfig(Section):
    """Scoring of answers."""

    functions: tuple[RewardFunction, ...] = ()
    """Reward functions. Each is a name, e.g. "exact_match" or "FILE.py:function", or a table with the keys `use`,
    `name`, `weight`, `group`, `by_token` and `options`."""
    model: str = ""
    """Folder of a reward model: a sequence classifier with one label and the tokenizer of model.name, unless it reads
    text. Its score of prompt and answer is the reward term `model`, with or without functions beside it."""
    reads: Literal["tokens", "text"] = "tokens"
    """Form in which the model reads samples. tokens: those of the policy, whose tokenizer it has. text: prompt and
    answer, which its own chat template and tokenizer turn into its tokens; `model` may then be a name on the hub."""
    weight: float = 1.0
    """Factor of the model's score in the sum."""
    device: str = "cpu"
    """Device of the reward model or cost model."""
    pool: str = ""
    """Pool of the workers that score, a table of `pools`; `device` is then not read."""
    replicas: Positive = 1
    """Number of workers that score, each with its own copy of the model and its own child processes."""
    layout: LayoutConfig = LayoutConfig()
    """Ranks of each replica of the model, one process each, as in training.layout: { dp = 1, shard = 1, tp = 1 }. The
    first of them runs the functions."""
    workers: Positive = 1
    """Number of child processes of each replica that run the functions in parallel."""
    deadline: PositiveFloat = 10.0
    """Seconds that one call of a function may take."""
    on_error: Literal["fail", "zero", "ignore"] = "fail"
    """Effect of a function that fails: `fail` ends the run, `zero` counts 0 for that function, `ignore` leaves the
    sample out of the baseline and the loss."""

    @property
    def terms(self) -> list[str]:
        """Names of all terms of the score, in metrics and samples."""
        return [function.term for function in self.functions] + ([MODEL_TERM] if self.model else [])


class CostConfig(RewardConfig):
    """Costs of answers, scored like rewards. Used with `constraint = "lagrangian"`."""

    functions: tuple[RewardFunction, ...] = ()
    """Cost functions: a higher value is worse. Each is a name, e.g. "FILE.py:function", or a table with the keys `use`,
    `name`, `weight`, `group` and `options`."""
    limit: float | None = None
    """Largest mean cost of an answer. The multiplier rises while the mean cost of a batch is above this limit."""
    multiplier: PositiveFloat = 1.0
    """Initial value of the Lagrange multiplier: the reward that one unit of cost outweighs."""
    multiplier_rate: Annotated[float, Field(ge=0)] = 0.1
    """Step size of the logarithm of the multiplier."""
    multiplier_max: PositiveFloat = 5.0
    """Largest value of the multiplier."""


class ReferenceConfig(Section):
    """The frozen reference model of the KL term."""

    device: str = "cpu"
    """Device of the reference model."""
    pool: str = ""
    """Pool of the reference workers, a table of `pools`; `device` is then not read."""
    replicas: Positive = 1
    """Number of reference workers, each with its own copy of the model."""
    layout: LayoutConfig = LayoutConfig()
    """Ranks of each replica, one process each, as in training.layout: { dp = 1, shard = 1, tp = 1 }."""
    router_replay: bool = False
    """Uses the experts that generation chose, as training.router_replay does, which must be on. False: the reference
    model's routers choose."""


class CriticConfig(Section):
    """The critic of `advantage = "gae"`. `[cost_critic]` is the critic of costs. Other settings are in `[training]`."""

    model: str = ""
    """Folder for from_pretrained with the tokenizer of model.name, e.g. of an earlier critic; default: model.name."""
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Learning rate of the critic; default: ten times training.learning_rate."""
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """Largest distance of a value from the value at sampling time before its gradient is clipped; 0: no clipping."""
    device: str = "cpu"
    """Device of the critic."""
    pool: str = ""
    """Pool of the critic, a table of `pools`; `device` is then not read."""
    layout: LayoutConfig = LayoutConfig()
    """Ranks of the critic, one process each, as in training.layout: { dp = 1, shard = 1, tp = 1 }."""

    def rate(self, policys: float) -> float:
        """Returns the learning rate beside that of the policy: a critic's head starts at 0, and while it lags behind
        the policy it adds noise to every advantage."""
        return 10.0 * policys if self.learning_rate is None else self.learning_rate


class StalenessConfig(Section):
    """The bound on the age of trained tokens."""

    limit: Annotated[int, Field(ge=0)] = 2
    """Largest staleness in versions (eta): no older token enters the loss, except under `policy = "admit"`. 0 is
    synchronous training."""
    policy: Literal["mask", "drop", "block", "admit"] = "mask"
    """Treatment of older tokens. mask: older tokens leave the loss. drop: samples with an older token are dropped.
    block: the fleet waits so that no token gets older. admit: all tokens train, without a bound, for comparison."""
    cut_at: Annotated[int, Field(gt=0)] | Literal["never"] | None = None
    """Number of members of a group that must have a reward before a part of the group may train; default:
    max(2, samples_per_prompt // 2). Only `policy = "mask"` reads it."""
    admission: Literal["adaptive", "full", "lockstep"] = "full"
    """Number of samples that are drawn ahead of the trainer. adaptive: as many as keep it busy, learned from how often
    it waits. full: as many as the limit allows. lockstep: one batch, drawn when a step begins; the step changes the
    weights once that batch is scored, so that one version samples each batch and the next trains it. It needs
    limit = 1."""
    publish_deadline: PositiveFloat = 10.0
    """Seconds that generation workers have to take over new weights. A slower worker is killed and started again."""


class MismatchConfig(Section):
    """Bounds of the difference between sampling and training policy, and between the two engines."""

    warn_kl: PositiveFloat | None = 1.0
    """Prints a warning when `mismatch/kl` of a step is larger; in nats per token. Good runs stay under 0.1."""
    stop_kl: PositiveFloat | None = None
    """Ends the run when `mismatch/kl` of a step is larger; in nats per token."""
    warn_ess: Annotated[float, Field(gt=0, le=1)] | None = None
    """Prints a warning when `mismatch/ess`, the effective share of tokens, is smaller."""
    stop_ess: Annotated[float, Field(gt=0, le=1)] | None = None
    """Ends the run when `mismatch/ess`, the effective share of tokens, is smaller."""
    warn_canary: PositiveFloat | None = 1.0
    """Warns when `mismatch/canary`, the difference of engine and trainer with the same weights, is larger; in nats."""
    stop_canary: PositiveFloat | None = None
    """Ends the run when `mismatch/canary` is larger; in nats."""


Reaction = Literal["warn", "stop", "off"]
"""The answer of a guard that sees trouble."""


class GuardsConfig(Section):
    """Guards against training that goes on and comes to nothing, and other trouble: each warns, stops the run, or is
    off."""

    no_signal: Reaction = "warn"
    """Reaction to 128 groups in a row (or four batches) with equal rewards, all dropped by dynamic sampling."""
    no_variance: Reaction = "warn"
    """Reaction to a start of 5 steps or more with one reward for all samples (64 or more) or a gradient of 0 (512 or
    more), and to 10 steps in which over 80 % of the groups had equal rewards, unless the reward rose before."""
    no_movement: Reaction = "warn"
    """Reaction to a learning rate so small that the log-prob of a token moves by less than 0.1 nats in the whole run.
    The change is estimated from `mismatch/kl` over 10 steps with stale samples, so this guard is silent at staleness 0
    and where the rounding of bfloat16 is larger than the change."""
    reward_errors: Reaction = "warn"
    """Reaction to a failed reward on each of the last samples, twice as many as can be in flight, where
    `on_error = "zero"` hides it."""
    first_failure: Reaction = "warn"
    """Reaction to the first reward or cost that fails, where `on_error` lets the run go on."""
    unscored: Reaction = "stop"
    """Reaction to a row of samples without any reward, twice as many as can be in flight."""
    poison: Reaction = "warn"
    """Reaction to a group that is given up because it fails or crashes workers where it runs alone."""
    algorithm_drops: Reaction = "stop"
    """Reaction to an algorithm that drops twice as many samples as can be in flight while none trains."""
    collapse: Reaction = "warn"
    """Reaction to a mean reward that lost half of its best, with a gradient of 0 or hardly any entropy left."""
    truncation: Reaction = "warn"
    """Reaction to 5 steps in which over half of the samples had an answer that generation.max_new_tokens cut off."""
    learning_rate: Reaction = "warn"
    """Reaction to a learning rate, of the policy or a critic, over what models stand: 0.03 for optimizers that move
    every weight by about the rate, which is five times that of the warm-up of `warmed:` models, 10 for sgd and asgd
    with a max_grad_norm of 1, 30 for adadelta. It is checked before the run starts."""


class Config(Section):
    """One experiment."""

    name: str = "experiment"
    """Name of the experiment, which names its run directories; default: the name of the file."""
    seed: int = 0
    """Seed of the order of prompts, of sampling and of models made on the spot."""
    steps: Positive = 100
    """Number of training steps."""
    finish: Literal["abandon", "drain"] = "abandon"
    """Treatment of samples in flight after the last step: `abandon` drops them, `drain` trains them in more steps."""
    pools: dict[str, PoolConfig] = Field(default={})
    """Devices that services share, by name: { gpus = { devices = ["cuda:0", "cuda:1"], memory_gb = 40 } }. Each is a
    table with the keys `devices`, `hosts` (those whose workers may join) and `memory_gb` (budget of each device)."""
    model: ModelConfig
    task: TaskConfig
    generation: GenerationConfig = GenerationConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    acting: ActingConfig = ActingConfig()
    reward: RewardConfig = RewardConfig()
    feedback: FeedbackConfig = FeedbackConfig()
    reference: ReferenceConfig = ReferenceConfig()
    training: TrainingConfig = TrainingConfig()
    critic: CriticConfig = CriticConfig()
    cost: CostConfig = CostConfig()
    cost_critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    mismatch: MismatchConfig = MismatchConfig()
    guards: GuardsConfig = GuardsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    fleet: FleetConfig = FleetConfig()
    children: ChildrenConfig = ChildrenConfig()

    @model_validator(mode="after")
    def _values_fit_together(self) -> "Config":
        place_services(self)
        if problems := [problem for problem in rule_problems(self) if not problem.is_warning]:
            raise Incoherent(problems)
        return self

    @property
    def response_tokens(self) -> int:
        """Returns the most tokens that a row has after its prompt: those of an answer, or of an episode."""
        return self.environment.max_tokens if self.environment.use else self.generation.max_new_tokens

    @property
    def is_scored(self) -> bool:
        """Says whether samples are rewarded: by functions, a model, a person, or the environment that they play."""
        environment = self.environment.use or self.acting.env
        return bool(self.reward.functions or self.reward.model or environment) or self.feedback.asks

    @property
    def generation_workers(self) -> int:
        """Returns the number of workers that sample: with `generation.colocate` one inside each rank of the trainer."""
        return self.generation.replicas if self.generation.colocate == "none" else self.training.layout.size

    @property
    def generation_replicas(self) -> int:
        """Returns the number of models that sample, each by one worker, or by ranks of the trainer in a group."""
        return self.generation_workers // self.generation.layout.size

    @property
    def publishes_weights(self) -> bool:
        """Says whether the trainer publishes weights: for workers of generation, or else of evaluation."""
        return self.generation.colocate == "none" or self.evaluate.is_on

    @property
    def reference_by_service(self) -> bool:
        """Says whether a service computes reference log-probs. With adapters the trainer does, by the model under them;
        but critics read these log-probs in processes of their own."""
        return self.algorithm.kl > 0 and (self.model.lora is None or self.algorithm.advantage == "gae")

    @property
    def warnings(self) -> list[Problem]:
        """Returns a problem for each value that nothing reads."""
        return [problem for problem in rule_problems(self) if problem.is_warning]

    @property
    def scorers(self) -> dict[Scorer, RewardConfig]:
        """Returns the sections of the services that score samples; costs only where the algorithm has costs."""
        costs: dict[Scorer, RewardConfig] = {"cost": self.cost} if self.algorithm.constraint != "none" else {}
        return {"reward": self.reward, **costs}
