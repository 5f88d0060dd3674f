"""The optimizers of `training.optimizer` with their options, without torch; a test holds that these are torch's."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


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
    of its package with it, for CPUs too."""

    name: str
    options: Mapping[str, Option] = field(default_factory=dict)
    betas: bool = False
    weight_decay: bool = True
    kept: float = 1.0
    keeping: tuple[str, ...] = ("amsgrad",)
    highest: float = HIGHEST_STEP
    by_gradient: bool = False
    module: str = "torch.optim"
    since: tuple[int, int] = (2, 6)


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
