"""All keys of an experiment as frozen models, without torch: its sections, and what follows from several of their keys.
The text below a key is what `asyncrl keys`, error messages and docs/reference/config.md say about it."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from asyncrl.config.sections.algorithm_config import AlgorithmConfig as AlgorithmConfig
from asyncrl.config.sections.algorithm_config import MayChange, NonEmpty, Positive, PositiveFloat, Section
from asyncrl.config.sections.device_pools import PoolConfig
from asyncrl.config.sections.evaluate_config import EvaluateConfig
from asyncrl.config.sections.evaluate_config import RewardFunction as RewardFunction
from asyncrl.config.sections.generation_engines import ENGINE_MEANING, ENGINES, Engine, EngineName
from asyncrl.config.sections.named_values import Named
from asyncrl.config.sections.runtime_config import ChildrenConfig, FeedbackConfig, TelemetryConfig
from asyncrl.config.sections.runtime_config import FleetConfig as FleetConfig
from asyncrl.config.sections.secret import Options
from asyncrl.config.sections.task_config import IN_MEMORY as IN_MEMORY
from asyncrl.config.sections.task_config import ActingConfig, EnvironmentConfig
from asyncrl.config.sections.task_config import TaskConfig as TaskConfig
from asyncrl.config.sections.training_config import GenerationLayoutConfig, LayoutConfig, WeightsConfig
from asyncrl.config.sections.training_config import ModelConfig as ModelConfig
from asyncrl.config.sections.training_config import TrainingConfig as TrainingConfig
from asyncrl.protocols.staleness import POLICIES, POLICY_MEANING, Policy, StalenessPolicy

Scorer = Literal["reward", "cost"]
"""The services that score samples. Each has a section of the config with its name."""


def _no_halves(value: object) -> object:
    """Returns the value. Raises ValueError for "halves", which an older asyncrl took."""
    if value == "halves":
        raise ValueError(
            'there are no "halves" any more: write "training" with staleness.limit = 0, or "none", where '
            'staleness.admission = "lockstep" trains the same samples'
        )
    return value


class GenerationConfig(Section):
    """Sampling of answers."""

    engine: Annotated[EngineName, Field(description=ENGINE_MEANING)] = "torch"
    vllm: Options = Field(default={})
    """Further arguments of vLLM's AsyncEngineArgs, such as { enforce_eager = false }."""
    layout_tp: MayChange[Positive] = 1
    """Processes that share each layer of one replica of vLLM."""
    replicas: MayChange[Positive] = 1
    """Number of generation workers."""
    colocate: MayChange[Annotated[Literal["none", "training"], BeforeValidator(_no_halves)]] = "none"
    """Processes that sample: generation workers (none), or the trainer's ranks between two steps (training), which
    needs staleness.limit = 0."""
    layout: MayChange[GenerationLayoutConfig] = GenerationLayoutConfig()
    """Groups in which the trainer's ranks sample, by the table [generation.layout]."""
    slots: MayChange[Positive] = 32
    """Number of sequences that one replica decodes together."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability that the likeliest tokens, which may be sampled, reach together, after temperature, min_p and top_k.
    Log-probs are those of the tokens left."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of the likeliest tokens that may be sampled; 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Least probability of a token that may be sampled, as a share of the likeliest one's."""
    max_new_tokens: Positive = 64
    """Largest number of tokens of an answer."""
    stop: tuple[NonEmpty, ...] = ()
    """Strings that end an answer; rewards see the text before them."""
    kv: Literal["keep", "recompute"] = "keep"
    """Keys and values of running samples under new weights: kept, or computed again (recompute)."""
    cache_gb: MayChange[Annotated[float, Field(ge=0)]] = 0.0
    """Most GB (10^9 bytes) of keys and values of a replica, which preempts samples; 0: all slots fit."""
    prefill_tokens: MayChange[Annotated[int, Field(ge=0)]] = 0
    """Tokens of prompts in a step beside a full batch of samples; 0: 32 on a CPU, else 2048."""
    deterministic: bool = False
    """Makes samples independent of slots, neighbours and order of arrival, bit for bit. This is slower, and refused for
    models with experts."""
    device: MayChange[str] = "cpu"
    """Device of the generation workers, such as cpu or cuda:0."""
    pool: MayChange[str] = ""
    """Pool of these workers, in place of `device`."""
    stored_samples: Annotated[str, Named.ROWS] = ""
    """Parquet file of samples to train on (`asyncrl samples RUN_DIR --parquet FILE`)."""
    deadline: MayChange[PositiveFloat] = 600.0
    """Seconds of the engine for one sample, queueing left out, which is then cut off (finish reason `length`)."""

    @property
    def engine_facts(self) -> Engine:
        """Returns what the engine can do."""
        return ENGINES[self.engine]


MODEL_TERM = "model"
"""Name of the reward term of `reward.model` or `cost.model`."""


class RewardConfig(Section):
    """Scoring of answers."""

    functions: Annotated[tuple[RewardFunction, ...], Named.FUNCTIONS] = ()
    """Reward functions: names such as "exact_match" or "FILE.py:function", or tables."""
    model: Annotated[str, Named.MODEL] = ""
    """Folder of a reward model: a sequence classifier with one label and, unless it reads text, the policy's tokenizer.
    Its score is the reward term `model`."""
    reads: Literal["tokens", "text"] = "tokens"
    """Form in which the model reads samples: tokens of the policy, or text, where `model` may be a name on the hub."""
    weight: float = 1.0
    """Factor of the model's score in the sum."""
    device: MayChange[str] = "cpu"
    """Device of the model."""
    pool: MayChange[str] = ""
    """Pool of these workers, in place of `device`."""
    replicas: MayChange[Positive] = 1
    """Number of workers that score, each with a copy of the model."""
    layout: MayChange[LayoutConfig] = LayoutConfig()
    """Ranks of each replica of the model."""
    workers: MayChange[Positive] = 1
    """Child processes of each replica for the functions."""
    deadline: MayChange[PositiveFloat] = 10.0
    """Seconds of one call of a function."""
    on_error: Literal["fail", "zero", "ignore"] = "fail"
    """Effect of a failure: the run ends (fail), it counts 0 (zero), or the sample leaves baseline and loss (ignore)."""

    @property
    def terms(self) -> list[str]:
        """Names of all terms of the score, in metrics and samples."""
        return [function.term for function in self.functions] + ([MODEL_TERM] if self.model else [])


class CostConfig(RewardConfig):
    """Costs of answers, scored like rewards, with `constraint = "lagrangian"`."""

    functions: Annotated[tuple[RewardFunction, ...], Named.FUNCTIONS] = ()
    """Cost functions, as reward.functions: a higher value is worse."""
    limit: float | None = None
    """Largest mean cost of an answer, beyond which the multiplier rises."""
    multiplier: PositiveFloat = 1.0
    """Initial Lagrange multiplier: the reward that one unit of cost outweighs."""
    multiplier_rate: Annotated[float, Field(ge=0)] = 0.1
    """Step size of the logarithm of the multiplier."""
    multiplier_max: PositiveFloat = 5.0
    """Largest value of the multiplier."""


class ReferenceConfig(Section):
    """The frozen reference model of the KL term."""

    device: MayChange[str] = "cpu"
    """Device of the reference model."""
    pool: MayChange[str] = ""
    """Pool of these workers, in place of `device`."""
    replicas: MayChange[Positive] = 1
    """Number of reference workers."""
    layout: MayChange[LayoutConfig] = LayoutConfig()
    """Ranks of each replica."""
    router_replay: bool = False
    """Uses the experts that generation chose, with training.router_replay."""


class CriticConfig(Section):
    """The critic of `advantage = "gae"`; `[cost_critic]` is that of costs. Other settings are in `[training]`."""

    model: Annotated[str, Named.MODEL] = ""
    """Folder of a model with the tokenizer of model.name, such as an earlier critic; default: model.name."""
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Learning rate of the critic; default: ten times training.learning_rate."""
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """Distance of a value from that at sampling time beyond which its gradient is clipped; 0: no clipping."""
    device: MayChange[str] = "cpu"
    """Device of the critic."""
    pool: MayChange[str] = ""
    """Pool of the critic, in place of `device`."""
    layout: MayChange[LayoutConfig] = LayoutConfig()
    """Ranks of the critic."""

    def rate(self, policys: float) -> float:
        """Returns the learning rate beside that of the policy: a critic's head starts at 0, and while it lags behind
        the policy it adds noise to every advantage."""
        return 10.0 * policys if self.learning_rate is None else self.learning_rate


class StalenessConfig(Section):
    """The bound on the age of trained tokens."""

    limit: Annotated[int, Field(ge=0)] = 2
    """Largest staleness in versions (eta) of a token in the loss, except under `policy = "admit"`; 0: synchronous."""
    policy: Annotated[Policy, Field(description=POLICY_MEANING)] = "mask"
    cut_at: Annotated[int, Field(gt=0)] | Literal["never"] | None = None
    """Scored members of a group from which a part of it may train, with `policy = "mask"`; default: max(2,
    samples_per_prompt // 2)."""
    admission: Literal["adaptive", "full", "lockstep"] = "full"
    """Samples drawn ahead of the trainer: as many as keep it busy (adaptive), as the limit allows (full), or one batch,
    which one version samples and the next trains (lockstep; limit = 1)."""
    publish_deadline: MayChange[PositiveFloat] = 10.0
    """Seconds in which generation workers take over new weights; a slower one is started again."""

    @property
    def rule(self) -> StalenessPolicy:
        """Returns what follows from `policy`."""
        return POLICIES[self.policy]


class MismatchConfig(Section):
    """Bounds of the difference between sampling and training policy, and between the two engines."""

    warn_kl: PositiveFloat | None = 1.0
    """Warns when `mismatch/kl` of a step is larger, in nats per token; good runs stay under 0.1."""
    stop_kl: PositiveFloat | None = None
    """Ends the run when `mismatch/kl` of a step is larger."""
    warn_ess: Annotated[float, Field(gt=0, le=1)] | None = None
    """Warns when `mismatch/ess`, the effective share of tokens, is smaller."""
    stop_ess: Annotated[float, Field(gt=0, le=1)] | None = None
    """Ends the run when `mismatch/ess` is smaller."""
    warn_canary: PositiveFloat | None = 1.0
    """Warns when `mismatch/canary`, between engine and trainer with the same weights, is larger, in nats."""
    stop_canary: PositiveFloat | None = None
    """Ends the run when `mismatch/canary` is larger."""


Reaction = Literal["warn", "stop", "off"]
"""The answer of a guard that sees trouble."""


class GuardsConfig(Section):
    """Guards against training that comes to nothing, and other trouble: each warns, stops the run, or is off."""

    no_signal: Reaction = "warn"
    """Reaction to 128 groups in a row (or four batches) that dynamic sampling drops for equal rewards."""
    no_variance: Reaction = "warn"
    """Reaction to a start of 5 steps with one reward or a gradient of 0, and to 10 steps with equal rewards in over 80
    % of the groups, unless the reward rose before."""
    no_movement: Reaction = "warn"
    """Reaction to a learning rate that moves log-probs by less than 0.1 nats in the whole run, by `mismatch/kl` of 10
    steps with stale samples."""
    reward_errors: Reaction = "warn"
    """Reaction to failed rewards on twice as many samples in a row as can be in flight, with `on_error = "zero"`."""
    first_failure: Reaction = "warn"
    """Reaction to the first failed reward or cost that `on_error` passes over."""
    unscored: Reaction = "stop"
    """Reaction to twice as many samples in a row without a reward as can be in flight."""
    poison: Reaction = "warn"
    """Reaction to a group that fails or crashes workers also alone, and is given up."""
    algorithm_drops: Reaction = "stop"
    """Reaction to an algorithm that drops twice as many samples as can be in flight while none trains."""
    collapse: Reaction = "warn"
    """Reaction to a mean reward under half of its best, with a gradient of 0 or hardly any entropy."""
    truncation: Reaction = "warn"
    """Reaction to 5 steps in which generation.max_new_tokens cut off over half of the samples."""
    learning_rate: Reaction = "warn"
    """Reaction, before the start, to a learning rate over 0.03, for sgd and asgd with a max_grad_norm of 1 over 10, for
    adadelta over 30."""


class Experiment(Section):
    """All keys of one experiment, each right by itself, and what follows of them; in a `Config` they fit together."""

    name: MayChange[str] = "experiment"
    """Name of the experiment and its run directories; default: that of the file."""
    seed: int = 0
    """Seed of prompts, of sampling and of models made on the spot."""
    steps: MayChange[Positive] = 100
    """Number of training steps."""
    finish: MayChange[Literal["abandon", "drain"]] = "abandon"
    """Treatment of samples in flight after the last step: dropped (abandon), or trained in more steps (drain)."""
    pools: MayChange[dict[str, PoolConfig]] = Field(default={})
    """Devices that services share, by name: { gpus = { devices = ["cuda:0", "cuda:1"], memory_gb = 40 } }."""
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
    mismatch: MayChange[MismatchConfig] = MismatchConfig()
    guards: MayChange[GuardsConfig] = GuardsConfig()
    evaluate: MayChange[EvaluateConfig] = EvaluateConfig()
    telemetry: MayChange[TelemetryConfig] = TelemetryConfig()
    fleet: MayChange[FleetConfig] = FleetConfig()
    children: MayChange[ChildrenConfig] = ChildrenConfig()

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
    def scorers(self) -> dict[Scorer, RewardConfig]:
        """Returns the sections of the services that score samples; costs only where the algorithm has costs."""
        costs: dict[Scorer, RewardConfig] = {"cost": self.cost} if self.algorithm.constraint != "none" else {}
        return {"reward": self.reward, **costs}
