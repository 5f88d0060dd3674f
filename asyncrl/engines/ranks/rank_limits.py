"""Tells in which layouts ranks can share out a model, from the content of its config.json, and which ranks of the
trainer sample together, without torch.

tp    divides heads, key-value heads and the inner size of feed-forward layers
pp    is at most the number of layers
sp    divides heads and key-value heads
ep    divides experts
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any

from asyncrl.config.placement import layouts
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.config.sections.training_config import AnyLayout
from asyncrl.engines.models.model_families import PACKING, can_pack, refusal_of_sharing
from asyncrl.engines.models.model_shape import described
from asyncrl.engines.models.prompt_pictures import WITH_PICTURES
from asyncrl.protocols.rank_layout import Layout

STAGED = ("llama", "qwen2", "qwen3")
"""Models whose forward pass is embedding, layers and norm, with nothing between them, by their `model_type`."""
SLICED = ("llama", "mistral", "qwen2", "qwen3")
"""Models that ranks can sample with together, by their `model_type`: those of generation's fast path."""
HEADS = ("num_attention_heads", "num_key_value_heads")
SPLIT = (*HEADS, "intermediate_size")


def refusal_of_splitting(shape: Mapping[str, Any], ranks: int) -> str:
    """Returns why so many ranks cannot split the layers of a model; "" where its numbers allow it."""
    return _undivided("tp", shape, SPLIT, ranks)


def refusal_of_slicing(shape: Mapping[str, Any], ranks: int) -> str:
    """Returns why so many ranks cannot compute slices of its rows; "" where they can."""
    if not can_pack(shape):
        return (
            f"sp cuts rows of the families {', '.join(PACKING)} whose layers attend to all earlier tokens, and this "
            f"model is {shape.get('model_type')}; write sp = 1"
        )
    return _undivided("sp", shape, HEADS, ranks)


def refusal_of_stages(shape: Mapping[str, Any], stages: int) -> str:
    """Returns why a model cannot have so many pipeline stages; "" where it can."""
    family = shape.get("model_type")
    layers = shape.get("num_hidden_layers")
    if family not in STAGED:
        return (
            f"pp splits models of the families {', '.join(STAGED)} by layers, and this one is {family}; write pp = 1, "
            "and dp or shard for ranks"
        )
    if layers is not None and stages > layers:
        return f"pp = {stages} is more than its layers, num_hidden_layers = {layers}: write {layers} or less"
    return ""


RULES: Mapping[str, Callable[[Mapping[str, Any], int], str]] = {
    "tp": refusal_of_splitting,
    "pp": refusal_of_stages,
    "sp": refusal_of_slicing,
    "ep": refusal_of_sharing,
}
"""Functions that tell why so many ranks of an axis cannot share out a model, by the axis."""


def layout_refusals(shape: Mapping[str, Any], layout: AnyLayout) -> Iterator[str]:
    """Yields why ranks in this layout cannot share out a model. shape: the content of its config.json; where it lacks
    a number, only ranks tell."""
    for axis, refusal in RULES.items():
        if (ranks := getattr(layout, axis)) > 1 and (text := refusal(shape, ranks)):
            yield text


def models_of_services(config: Config, policy: str) -> dict[str, str]:
    """Returns the folder or name of the model of each service that may have several ranks. policy: that of the model
    that is trained, which services without a model of their own take, but for scores."""
    own = {service: str(getattr(getattr(config, service), "model", "") or "") for service in layouts(config)}
    found = {service: name or ("" if service in config.scorers else policy) for service, name in own.items()}
    return {service: name for service, name in found.items() if name}


def rank_problems(config: Config, models: Mapping[str, str]) -> Iterator[Problem]:
    """Yields a problem for each layout whose ranks cannot share out the model of their service, as far as it is known
    without a download. models: folders or names, by service."""
    for service, layout in layouts(config).items():
        name = models.get(service, "")
        shape = described(name, config.generation.engine) if name else None
        if shape is not None and shape.get("model_type") not in WITH_PICTURES:
            for refusal in layout_refusals(shape, layout):
                yield Problem(f"{service}.layout", "", f"{name}: {refusal}")
    yield from _sampling_problems(config, models.get("training", ""))


def _sampling_problems(config: Config, policy: str) -> Iterator[Problem]:
    """Yields a problem where ranks that sample together cannot share out the layers of a policy."""
    if (layout := config.generation.layout).size == 1 or not policy:
        return
    shape = described(policy, config.generation.engine)
    if shape is not None and (family := shape.get("model_type")) not in SLICED:
        chosen = ", ".join(f"{axis} = {size}" for axis, size in layout.shared_out.items())
        one = ", ".join(f"{axis} = 1" for axis in layout.shared_out)
        text = (
            f"{policy}: {chosen} cuts models of the families {', '.join(SLICED)}, and this one is {family}; write {one}"
        )
        yield Problem("generation.layout", "", text)


def sampling_ranks(config: Config) -> list[list[int]]:
    """Returns the ranks of the trainer that sample together, by replica of generation and rank in it; none where
    workers of their own sample."""
    if config.generation.colocate == "none":
        return []
    trained = config.training.layout
    generation = config.generation
    copies = trained.size // (trained.pp * trained.tp)
    layout = Layout(trained.pp, trained.tp, copies, generation.layout.pp, generation.layout.tp)
    return layout.generation_replicas()


def _undivided(axis: str, shape: Mapping[str, Any], names: Sequence[str], ranks: int) -> str:
    """Returns which of the numbers so many ranks do not divide, and how many would; "" where they divide all."""
    numbers = {name: int(shape[name]) for name in names if shape.get(name)}
    wrong = [f"{name} = {number}" for name, number in numbers.items() if number % ranks]
    if not wrong:
        return ""
    common = gcd(*numbers.values())
    values = [str(each) for each in range(1, common + 1) if common % each == 0]
    return f"{axis} = {ranks} does not divide {_listed(wrong, 'and')}: write {_listed(values, 'or')}"


def _listed(texts: Sequence[str], word: str) -> str:
    """Returns the texts separated by commas, the last one by a word."""
    *some, last = texts
    return f"{', '.join(some)} {word} {last}" if some else last
