"""The families of models that this version trains, and why others are refused; read from config.json, without torch.

tests/unit/engines/models/test_families.py trains a tiny random model of each family in TRAINED and holds that the
engine's log-probs are those of transformers. docs/models.md has them as tables.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.engines.experts.record_shape import KEY, REPLAYED
from asyncrl.engines.pictures.prompt_pictures import WITH_PICTURES

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
        yield Problem(KEY, "", text)
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
    if config.generation.engine != "torch" and REFUSED.get(name) in (RECURRENT, LATENT, BIASED, CLOSED):
        return ""  # vLLM samples; the trainer computes whatever transformers does.
    if name in REFUSED:
        return REFUSED[name]
    if name in WITH_PICTURES:
        return ""
    if any(key.endswith(("vision_config", "audio_config")) for key in shape):
        return IMAGES
    return attention_not_computed(shape) if config.generation.engine == "torch" else ""


def _unable_with_pictures(config: Config) -> str:
    """Returns what of a config has no way for a model that reads pictures; "" where all has."""
    reasons = {
        'generation.engine = "vllm" samples without pictures; write "torch"': config.generation.engine == "vllm",
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
