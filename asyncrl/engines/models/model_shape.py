"""The numbers of a model, and of its encoder of pictures, that decide how much memory it takes: read from its
config.json, or known by its name; without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from asyncrl.config.sections.generation_engines import ENGINES
from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.engines.models.model_families import REPLAYED, RecordShape, can_pack
from asyncrl.engines.models.model_preparation import sees_pictures
from asyncrl.engines.models.prompt_pictures import WITH_PICTURES
from asyncrl.engines.models.warmed_model_cache import EYES
from asyncrl.protocols.distribute_collect import even_parts

# The numbers of a model's encoder of pictures that decide how much memory it takes; without torch.
#
# Counted in the values that torch keeps for each patch until the backward pass, where `hidden` and `inner` are
# widths:
#
#     a block: two norms                                        6 hidden
#              queries, keys and values with their rotation     7 hidden
#              gate, activation, up, product                    4 inner
#     patch embedding, last norm and merger                     6 hidden


FLOAT = 4
NORMS = 6
ATTENDED = 7
GATED = 4
OUTSIDE = 6
ATTENDING = 11
FEEDING = 4
GATES = 3
"""Values of width `hidden` while a block attends, in float32, and while it feeds forward, beside those of width
`inner`, where nothing is kept."""


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Describes the encoder of Qwen2.5-VL. patch: numbers of the pixels of a patch. merge: a token of the language
    model has merge x merge patches. output: width of the language model."""

    hidden: int
    inner: int
    blocks: int
    patch: int
    merge: int
    output: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Takes the `vision_config` of config.json. Raises KeyError when it describes another kind of encoder."""
        hidden, inner, blocks = (int(config[key]) for key in ("hidden_size", "intermediate_size", "depth"))
        channels = int(config.get("in_channels") or config.get("in_chans") or 3)
        patch = channels * int(config.get("temporal_patch_size") or 2) * int(config["patch_size"]) ** 2
        return cls(
            hidden, inner, blocks, patch, int(config.get("spatial_merge_size") or 2), int(config["out_hidden_size"])
        )

    @property
    def parameters(self) -> int:
        merged = self.merge**2 * self.hidden
        attention = self.hidden * (4 * self.hidden + 4)
        feed_forward = 3 * self.hidden * self.inner + 2 * self.inner + self.hidden
        merger = self.hidden + merged * (merged + 1) + self.output * (merged + 1)
        return self.patch * self.hidden + self.blocks * (attention + feed_forward + 2 * self.hidden) + merger

    def kept_bytes(self, patches: int, narrow: int, *, again: bool) -> int:
        """Returns the bytes that the backward pass finds of so many patches. narrow: bytes of a number that is not of a
        norm. again: blocks are computed again, so that one of them and the input of each are kept."""
        block = FLOAT * NORMS * self.hidden + narrow * (ATTENDED * self.hidden + GATED * self.inner)
        blocks = FLOAT * self.hidden * self.blocks + block if again else self.blocks * block
        return patches * (blocks + FLOAT * OUTSIDE * self.hidden)

    def pass_bytes(self, patches: int, narrow: int) -> int:
        """Returns the most bytes that a pass takes at one moment which keeps nothing. narrow: bytes of a number of the
        model."""
        feeding = narrow * (FEEDING * self.hidden + GATES * self.inner)
        return patches * max(FLOAT * ATTENDING * self.hidden, feeding)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("qwen3", "qwen3_moe")
"""Families, by `model_type`, that normalize queries and keys."""
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that decide how much memory a decoder-only transformer takes; its cache is counted in float32.
    linear: inputs and outputs of each linear layer of one decoder layer, by name. packs: whether rows
    train without padding, and prompts that samples share once. record: of the experts of a token, None where no router
    is replayed. head_norms: whether queries and keys are normalized. encoder: of pictures, whose parameters count as
    others outside of layers; None where the model reads none."""

    vocabulary: int
    hidden: int
    layers: int
    parameters: int
    cache_bytes_per_token: int
    linear: tuple[tuple[str, int, int], ...]
    packs: bool = False
    record: RecordShape | None = None
    head_norms: bool = False
    encoder: EncoderShape | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Computes them from a model folder's config.json; raises KeyError for another kind of model."""
        if config.get("model_type") in WITH_PICTURES:
            encoder = EncoderShape.of(config["vision_config"])
            text = cls.of({"tie_word_embeddings": config.get("tie_word_embeddings")} | _text_config(config))
            return replace(text, parameters=text.parameters + encoder.parameters, encoder=encoder)
        vocabulary, hidden, layers = (int(config[key]) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        queries = heads * head_dim
        keys = kv_heads * head_dim
        inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        attention = (("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys))
        mlp = (("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden))
        linear = (*attention, ("o_proj", queries, hidden), *mlp)
        experts = int(config.get("num_local_experts") or config.get("num_experts") or 1)
        sizes = [inputs * outputs * (1 if name.endswith(ATTENTION) else experts) for name, inputs, outputs in linear]
        layer = sum(sizes) + 2 * hidden
        embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        parameters = embeddings + layers * layer + hidden
        packs = can_pack(config)
        record = RecordShape.of(config) if config.get("model_type") in REPLAYED else None
        return cls(
            vocabulary,
            hidden,
            layers,
            parameters,
            2 * layers * keys * FLOAT,
            linear,
            packs,
            record,
            config.get("model_type") in HEAD_NORMS,
        )

    @property
    def experts(self) -> int:
        """Returns the experts of a layer; 1 for a model without any, and for families whose routers are not replayed,
        whose experts count as parameters outside of layers."""
        return 1 if self.record is None else max(1, self.record.experts)

    @property
    def chosen(self) -> int:
        """Returns the experts that a token has in a layer; 0 for a model without any."""
        return 0 if self.experts == 1 or self.record is None else self.record.chosen

    def layer_parameters(self, tp: int = 1, ep: int = 1) -> int:
        """Returns the parameters of one decoder layer on each of so many tensor ranks and ranks that share out experts,
        its two norms included."""
        attention, inside = self._matrices
        return (attention + self.experts // ep * inside) // tp + 2 * self.hidden

    @property
    def _matrices(self) -> tuple[int, int]:
        """Returns the parameters of attention, and of one expert, or of the one feed-forward layer."""
        sizes = [(inputs * outputs, name.endswith(ATTENTION)) for name, inputs, outputs in self.linear]
        return sum(size for size, of_attention in sizes if of_attention), sum(size for size, of in sizes if not of)

    @property
    def outside(self) -> int:
        """Returns the parameters outside of layers."""
        return self.parameters - self.layers * self.layer_parameters()

    def stage(self, number: int, stages: int, trained: int | None = None) -> Self:
        """Returns the shape of a pipeline stage: some of the layers, the embedding at the first one, norm and head at
        the last one. trained: stages of the trainer, for a stage that samples with the layers of several of them."""
        if stages == 1:
            return self
        table = self.vocabulary * self.hidden
        layers = len(layers_of_stage(self.layers, trained or stages, stages, number))
        outside = table * (number == 0) + (table + self.hidden) * (number == stages - 1)
        return replace(self, layers=layers, parameters=layers * self.layer_parameters() + outside)

    def width(self, name: str) -> int:
        """Returns the outputs of a linear layer of one decoder layer."""
        return next(outputs for each, _, outputs in self.linear if each == name)

    def adapters(self, lora: LoraConfig) -> int:
        """Returns the parameters of the adapters."""
        chosen = self.adapted(lora)
        sizes = (inputs + outputs for name, inputs, outputs in self.linear if name in chosen)
        return self.layers * lora.rank * sum(sizes)

    def adapted(self, lora: LoraConfig) -> set[str]:
        """Returns the layers with adapters. A target that is not the plain name of a layer counts as all."""
        known = {name for name, _, _ in self.linear}
        return known if set(lora.targets) - known else set(lora.targets)


def layers_of_stage(layers: int, trained: int, stages: int, number: int) -> range:
    """Returns the numbers of the layers of one of so many stages, which joins consecutive stages of the trainer; the
    first one has the most. layers: of the model. trained: stages of the trainer, a multiple of `stages`."""
    parts = even_parts([1] * layers, trained)
    each = trained // stages
    start, end = (sum(map(len, parts[:before])) for before in (number * each, (number + 1) * each))
    return range(start, end)


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what config.json of a model that reads pictures says of its language model, in either of its forms."""
    found = config.get("text_config") or config
    return {**found, "model_type": f"{config['model_type']}_text"}


LLAMA = {"tie_word_embeddings": True, "model_type": "llama"}


def _tied(vocabulary: int, hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int) -> dict[str, Any]:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**sizes, **attention, "intermediate_size": intermediate, **LLAMA}


SMOLLM2 = _tied(49152, 576, 30, 1536, heads=9, kv_heads=3)
PACKAGED = {"pypi:smollm2": Shape.of(SMOLLM2)}


def described(model: str, engine: str = "torch") -> dict[str, Any] | None:
    """Returns the content of the config.json of a model that is on this machine, and about that of one that comes with
    a package or that `warmed:` makes for an engine of generation; None before a download."""
    if model in PACKAGED:
        return SMOLLM2
    if model.startswith("warmed:"):
        heads = ENGINES[engine].heads
        eyes = {"model_type": WITH_PICTURES[0], "vision_config": EYES} if sees_pictures(model) else {}
        return _tied(101, 96, 3, 256, heads=heads, kv_heads=heads) | eyes
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def shape_of(model: str) -> Shape | None:
    """Returns the shape of a model that is on this machine or comes with a package; None before a download."""
    try:
        return None if (config := described(model)) is None else Shape.of(config)
    except (KeyError, ValueError):
        return None
