"""Reads from the config.json of a model what follows from its family, without torch: whether this version trains it and
why others are refused, which experts are recorded of its tokens, whether its rows are packed, and what it does
differently with longer rows.

tests/unit/engines/generation/test_families.py trains a tiny random model of each family in TRAINED and holds that the
engine's log-probs are those of transformers. docs/models.md has them as tables.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.engines.models.prompt_pictures import WITH_PICTURES
from asyncrl.errors import ConfigError
from asyncrl.protocols.batch import Columns, expert_columns

# The shape of what generation records of the routers for each token, read from a model's config.json, without torch.
#
#     record of a token    layer 0: k numbers of experts | layer 1: k numbers | ...       layers with experts only
#     dtype                one byte up to 255 experts, else two
#     none                 the largest number of the dtype: nothing is recorded of the token


ROUTER_REPLAY = "training.router_replay"
REPLAYED = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
"""Families, by `model_type`, whose routers are recorded and replayed."""


@dataclass(frozen=True, slots=True)
class RecordShape:
    """routers: layers with experts. chosen: experts of a token in each of them. experts: of each layer."""

    routers: int
    chosen: int
    experts: int

    @property
    def width(self) -> int:
        """Returns the numbers recorded for each token."""
        return self.routers * self.chosen

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("u1" if self.experts <= 255 else "<i2")

    @property
    def none(self) -> int:
        """Returns the number that stands where nothing is recorded."""
        return int(np.iinfo(self.dtype).max)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Reads the content of a config.json. Raises ConfigError for a model whose routers are not replayed."""
        family = str(config.get("model_type") or "")
        if family not in REPLAYED:
            raise ConfigError(
                f"{ROUTER_REPLAY}: the model is of the family {family!r}, and the experts of {', '.join(REPLAYED)} are "
                "replayed; remove the key"
            )
        experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
        plain = set(config.get("mlp_only_layers") or ())
        step = int(config.get("decoder_sparse_step") or 1)
        layers = range(int(config["num_hidden_layers"]))
        routers = sum(layer not in plain and (layer + 1) % step == 0 for layer in layers) if experts else 0
        return cls(routers, int(config["num_experts_per_tok"]), experts)

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Raises ConfigError as `of`."""
        return cls.of(json.loads((folder / "config.json").read_bytes()))


def recorded_columns(config: Config, folder: Path, tokens: int) -> Columns:
    """Returns the column of experts of rows with so many tokens, none where nothing is recorded. folder: of the model.
    Raises ConfigError as `RecordShape.of`."""
    if not config.training.router_replay:
        return {}
    shape = RecordShape.of_folder(folder)
    return expert_columns(tokens, shape.dtype, shape.width)


# Tells which models' experts ranks can share out, from config.json, without torch.


def refusal_of_sharing(shape: Mapping[str, Any], ranks: int) -> str:
    """Returns why so many ranks cannot share out the experts of a model; "" where they can. shape: the content of its
    config.json."""
    family = str(shape.get("model_type") or "")
    experts = int(shape.get("num_local_experts") or shape.get("num_experts") or 0)
    if family not in REPLAYED or not experts:
        return (
            f"ep = {ranks} is not supported for the family {family!r}: ranks share out the experts of "
            f"{', '.join(REPLAYED)}; write ep = 1, and dp or shard for ranks"
        )
    if experts % ranks:
        divisors = ", ".join(str(each) for each in range(1, experts + 1) if experts % each == 0)
        return f"ep = {ranks} is not supported for a model with {experts} experts: write one of {divisors}"
    return ""


# Says which models may compute packed rows, and when that is worth it; without torch.


PACKING = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of transformers that compute each token from positions that are given and from what attention returns."""

WORTH = 0.92
"""Tokens of a packed row over those of padded ones above which rows are padded: collecting queries, keys and values of
segments costs a step of a model of width 256 some 8 %, and wider ones less (`asyncrl-bench packed-rows`)."""

SHARED_ON_DEVICE = 1.0
"""Length of a prompt over the mean of its answers from which samples share it on a CUDA device. On an H200 a step with
prompts of a quarter was slower than one that computes them again, at 0.86 of its speed."""


def shared_from(device: str) -> float:
    """Returns the least length of a prompt, over the mean of its answers, that samples share on this kind of device."""
    return SHARED_ON_DEVICE if device == "cuda" else 0.0


def is_shared(prompt: int, answers: int, samples: int, least: float) -> bool:
    """Returns whether so many samples share a prompt of so many tokens. answers: tokens of all answers together; least:
    from `shared_from`."""
    return prompt * samples >= least * answers


def can_pack(config: Mapping[str, Any]) -> bool:
    """Returns whether rows of a model may be packed: its layers attend to all earlier tokens. config: the content of
    its config.json."""
    layers = set(config.get("layer_types") or ("full_attention",))
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    return config.get("model_type") in PACKING and layers == {"full_attention"} and not sliding


# Reads from the config.json of a model what it does differently with longer rows.
#
# A rotary embedding of the kind "dynamic" or "longrope" takes its frequencies from the longest row of a forward pass
# once that row passes a length, so that the log-probs of a token depend on the rows beside it. Windows, chunks and
# other branches begin at a length that the config names; a probe that is shorter never meets them.


BY_LONGEST_ROW = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies depend on the longest row of a forward pass."""
BY_POSITION = ("default", "linear", "yarn", "llama3", "proportional")
"""Kinds whose frequencies are the same for every row, so that their original length begins no branch."""
THRESHOLDS = ("window", "chunk", "original_max_position", "floor_scale")
"""Parts of the names of keys that hold a length at which a model begins to compute differently."""


def refuse_rotation_by_longest_row(folder: Path, config: Config, key: str = "model.name") -> None:
    """Raises ConfigError with what `rotation_by_longest_row` finds. key: of the config, names the model."""
    if found := rotation_by_longest_row(folder, config):
        raise ConfigError(f"{key}: {found}")


def rotation_by_longest_row(folder: Path, config: Config) -> str | None:
    """Describes why rows of this run would change each other's log-probs, and what to write; None when they do not."""
    path = folder / "config.json"
    longest = longest_row(config)
    shape = json.loads(path.read_bytes()) if path.exists() else {}
    for kind, original in _rotations(shape):
        if kind in BY_LONGEST_ROW and longest > original:
            return (
                f"{folder} has rotary embeddings of the kind {kind!r}, whose frequencies follow the longest row of a "
                f"forward pass once it passes {original} tokens, so rows would change each other's log-probs; a prompt "
                f"with its answer may have {longest} here: write task.max_prompt_tokens and generation.max_new_tokens "
                f"with a sum of at most {original}, or take another model"
            )
    return None


def probe_tokens_needed(shape: Mapping[str, Any], least: int, longest: int) -> int:
    """Returns the tokens of a probe that goes beyond every length below `longest` at which this model may begin to
    compute differently, at least `least`. shape: the contents of config.json."""
    thresholds = [length for length in _thresholds(shape) if length < longest]
    return min(max([least, *(length + least for length in thresholds)]), max(least, longest))


def _rotations(shape: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yields kind and original length of every rotary embedding; a model may have one for each type of layer."""
    shape = shape.get("text_config") or shape
    described = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    for each in (described, *(part for part in described.values() if isinstance(part, Mapping))):
        if kind := each.get("rope_type", each.get("type")):
            known = shape.get("max_position_embeddings") or 0
            trained = each.get("original_max_position_embeddings") or shape.get("original_max_position_embeddings")
            yield kind, int(known if kind == "dynamic" else trained or known)


def _thresholds(shape: Mapping[str, Any]) -> Iterator[int]:
    unread = ["original_max_position"] if shape.get("rope_type", shape.get("type")) in BY_POSITION else []
    unread += ["window"] if shape.get("use_sliding_window") is False else []
    for name, value in shape.items():
        if isinstance(value, Mapping):
            yield from _thresholds(value)
        elif type(value) is int and any(part in name for part in THRESHOLDS) and not any(u in name for u in unread):
            yield value


WINDOW = "sliding windows"
TRAINED: Mapping[str, str] = {
    "llama": "",
    "mistral": WINDOW,
    "qwen2": WINDOW,
    "qwen3": WINDOW,
    "gemma": "",
    "gemma2": f"{WINDOW}, soft caps of attention and logits",
    "gemma3_text": WINDOW,
    "phi": "rotation of a part of each head",
    "phi3": WINDOW,
    "olmo": "norms without weights",
    "olmo2": "norms behind the layers",
    "olmo3": WINDOW,
    "gpt_oss": f"{WINDOW}, attention sinks, experts",
    "granite": "scaled logits",
    "cohere": "scaled logits",
    "cohere2": f"scaled logits, {WINDOW}, layers without positions",
    "smollm3": "layers without positions",
    "exaone4": WINDOW,
    "glm": "",
    "glm4": "",
    "gpt2": "learnt positions",
    "gpt_neox": "",
    "starcoder2": WINDOW,
    "mixtral": "experts",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
}
"""Peculiarities of the attention or the output of each family, by `model_type` in config.json."""
RECURRENT = "some of its layers carry a state from token to token, and the KV cache has no place for it"
IMAGES = "its weights hold an encoder of images or sound too"
LATENT = "its values have another size than its keys, and the KV cache has one size for both"
ENCODER = "it is an encoder-decoder"
CLASSIFIES = "it reads a text from both sides and does not continue it"
CLOSED = "its code in transformers has no way for another attention function"
BIASED = "it biases attention by distance (ALiBi)"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("t5", "mt5", "bart", "mbart", "pegasus", "whisper", "t5gemma"), ENCODER),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba"), RECURRENT),
    **dict.fromkeys(("zamba", "zamba2", "lfm2", "qwen3_next", "nemotron_h", "granitemoehybrid", "minimax"), RECURRENT),
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "llava", "llava_next", "mllama", "idefics3", "smolvlm"), IMAGES),
    **dict.fromkeys(("qwen2_vl", "qwen3_vl", "mistral3", "pixtral", "paligemma", "llama4"), IMAGES),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3"), LATENT),
    **dict.fromkeys(("bert", "roberta", "distilbert", "xlm-roberta", "modernbert", "deberta-v2"), CLASSIFIES),
    **dict.fromkeys(("bloom", "mpt"), BIASED),
    "stablelm": CLOSED,
}
"""Why each family is refused, by `model_type`."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Types of layers, as `layer_types` in config.json names them, that the torch engine computes."""
OTHERS = "take a model of another family (docs/models.md lists those that train)"
GENERATING = ("CausalLM", "LMHead", "ConditionalGeneration")
"""Parts of the names that transformers gives to models with a head that continues texts."""
OTHER_HEADS: Mapping[str, str] = {
    "ForTokenClassification": "it is a critic, which values tokens and continues no text: write it in critic.model",
    "ForSequenceClassification": "it scores texts and continues none: write it in reward.model or cost.model",
}
"""Names of other heads, by their ends, each with what such a model is and where it belongs."""
HEADLESS = "it has no head that continues texts: take a folder whose config.json names a model ForCausalLM"
DIFFERS = "its logits differ by {:.2g} from transformers' own forward, so its attention is one that the engine lacks"


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a config.json with the number of experts of a layer."""
BY_NEIGHBOURS = (
    "it has experts, and the product of an expert has as many rows as other samples send there, so that the last bits "
    "of a sample depend on its neighbours: remove generation.deterministic, or take a model without experts"
)


def family_problems(config: Config, folder: Path) -> Iterator[Problem]:
    """Yields a problem for a model on this machine whose family cannot be trained as asked, and a warning for one that
    no test has trained."""
    path = folder / "config.json"
    if not path.is_file():
        return
    try:
        shape = json.loads(path.read_bytes())
    except ValueError:
        return  # `damages` names the file.
    name = str(shape.get("model_type") or "")
    if name in WITH_PICTURES and (unable := _unable_with_pictures(config)):
        yield Problem("model.name", "", f"{folder}: the family {name!r} reads pictures, and {unable}")
    reason = _reason(config, name, shape)
    if reason:
        yield Problem("model.name", "", f"{folder}: {not_computed(name, reason)}")
    elif head := _other_head(shape):
        yield Problem("model.name", "", f"{folder}: {head}")
    elif config.generation.deterministic and _has_experts(name, shape):
        yield Problem("generation.deterministic", "", f"{folder}: {BY_NEIGHBOURS}")
    elif config.training.router_replay and name not in REPLAYED:
        text = f"{folder} is of the family {name!r}, and experts of {', '.join(REPLAYED)} are replayed: remove it"
        yield Problem(ROUTER_REPLAY, "", text)
    elif name and name not in (*TRAINED, *WITH_PICTURES):
        text = (
            f"{folder} is of the family {name!r}, which no test has trained: each generation worker compares its "
            "log-probs with those of transformers at its start, and ends the run where they differ"
        )
        yield Problem("model.name", "", text, is_warning=True)


def _has_experts(family: str, shape: Mapping[str, Any]) -> bool:
    """Returns whether a config.json is of a model with experts; one that transformers saved lacks default numbers."""
    text = {**shape, **(shape.get("text_config") or {}), **(shape.get("ffn_config") or {})}
    found = [int(text[key] or 0) for key in EXPERTS if key in text]
    return any(found) if found else family in REPLAYED


def not_computed(name: str, reason: str) -> str:
    """Returns the text that refuses a family."""
    return f"the family {name!r} is not supported: {reason}; {OTHERS}"


def _other_head(shape: Mapping[str, Any]) -> str:
    """Returns why a model samples nothing, by the architectures that config.json names; "" where one samples, or where
    none is named."""
    named = [str(each) for each in shape.get("architectures") or ()]
    if not named or any(part in name for name in named for part in GENERATING):
        return ""
    found = (text for end, text in OTHER_HEADS.items() if any(name.endswith(end) for name in named))
    return f"its config.json names {', '.join(named)}; {next(found, HEADLESS)}"


def _reason(config: Config, name: str, shape: Mapping[str, Any]) -> str:
    if shape.get("is_encoder_decoder"):
        return ENCODER
    if not config.generation.engine_facts.is_own and REFUSED.get(name) in (RECURRENT, LATENT, BIASED, CLOSED):
        return ""  # vLLM samples; the trainer computes whatever transformers does.
    if name in REFUSED:
        return REFUSED[name]
    if name in WITH_PICTURES:
        return ""
    if any(key.endswith(("vision_config", "audio_config")) for key in shape):
        return IMAGES
    return attention_not_computed(shape) if config.generation.engine_facts.is_own else ""


def _unable_with_pictures(config: Config) -> str:
    """Returns what of a config has no way for a model that reads pictures; "" where all has."""
    generation = config.generation
    reasons = {
        f'generation.engine = "{generation.engine}" samples without pictures; write "torch"': (
            not generation.engine_facts.is_own
        ),
        "an environment speaks in text; leave out environment.use": bool(config.environment.use),
        'a critic reads text only; take an algorithm.advantage other than "gae"': config.algorithm.advantage == "gae",
        "reward models read text only; take reward functions": bool(config.reward.model or config.cost.model),
        "adapters for its layers are not made; leave out model.lora": config.model.lora is not None,
        "its layers are neither split nor put on stages, nor its weights shared out; write a layout with dp only": (
            any(each.size > each.dp for each in (config.training.layout, config.reference.layout))
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def attention_not_computed(shape: Mapping[str, Any]) -> str:
    """Returns why the torch engine does not compute the attention that config.json describes; "" where it does, or
    where only a comparison of logits would tell."""
    shape = shape.get("text_config") or shape
    if shape.get("is_encoder_decoder"):
        return ENCODER
    if others := sorted(set(shape.get("layer_types") or ()) - set(LAYER_TYPES)):
        return f"it has layers of the type {', '.join(others)}"
    if shape.get("use_bidirectional_attention"):
        return CLASSIFIES
    return BIASED if shape.get("alibi") else ""
