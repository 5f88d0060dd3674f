"""Loads the models that the torch engine supports, those with plain causal attention, and refuses all others."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.engines.canary_logprobs import PROBE_TOKENS
from asyncrl.engines.generation.forward.kv_cache import Ints
from asyncrl.engines.generation.forward.transformers_forward import NOTHING, FlatModel, PrefillSequence
from asyncrl.engines.model_loading import load_pretrained
from asyncrl.errors import ConfigError

PROBE_PREFILL = 8  # tokens of the probe in prefill; the rest is decoded one by one
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest difference to transformers, in nats: far above rounding and far below the effect of a wrong mask. It bounds
the maximum over log-probs in float32 and their mean in bfloat16, which rounds single unlikely tokens by more."""


def load_model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Loads a model for sampling.

    Raises:
        ConfigError: the attention of the model is not plain and causal.
    """
    model = load_pretrained(folder, dtype=dtype)
    refuse_unsupported(model.config)
    return model.to(device).eval().requires_grad_(False)


def refuse_unsupported(config: Any) -> None:
    """Raises ConfigError for attention features in the config that this engine would silently ignore."""
    name = config.model_type
    if config.is_encoder_decoder:
        raise _unsupported(name, "it is an encoder-decoder")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise _unsupported(name, f"its attention slides over a window of {config.sliding_window} tokens")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if others:
        raise _unsupported(name, f"it has layers of type {', '.join(others)}")
    if getattr(config, "attn_logit_softcapping", None):
        raise _unsupported(name, f"it caps attention logits at {config.attn_logit_softcapping}")
    if getattr(config, "alibi", False):
        raise _unsupported(name, "it biases attention by distance (ALiBi)")


def probe_logprobs(model: Any, ids: Ints) -> torch.Tensor:
    """Returns log-probs of the model's own forward over the probe `ids`; must run before its attention is replaced."""
    with torch.no_grad():
        tokens = torch.from_numpy(ids).to(model.device)
        logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0, PROBE_PREFILL - 1 :]
    return logits.float().log_softmax(-1)


def verify(flat: FlatModel, ids: Ints, expected: torch.Tensor) -> None:
    """Compares the flat forward, in prefill and decode, with `expected` from `probe_logprobs`.

    The comparison finds what no setting of the model tells. A written-out forward that differs is replaced by the
    model's modules.

    Raises:
        ConfigError: the modules differ too, by more than rounding.
    """
    tolerance = PROBE_TOLERANCE[flat.dtype]
    found = _largest_difference(flat, ids, expected)
    if not found <= tolerance and flat.direct is not None:
        flat.direct = None
        found = _largest_difference(flat, ids, expected)
    if not found <= tolerance:
        reason = f"its logits differ by {found:.2g} from transformers' own forward, so its attention is not plain"
        raise _unsupported(flat.model.config.model_type, reason)


def _largest_difference(flat: FlatModel, ids: Ints, expected: torch.Tensor) -> float:
    """Returns the difference of log-probs as PROBE_TOLERANCE counts it, without offsets common to all tokens."""
    found = [flat.logits(NOTHING, NOTHING, [PrefillSequence(0, ids[:PROBE_PREFILL])])]
    for position in range(PROBE_PREFILL, PROBE_TOKENS):
        found.append(flat.logits(ids[position : position + 1], np.array([position])))
    real = torch.isfinite(found[0][0])
    difference = (torch.cat(found).float()[:, real] - expected[:, real]).float()
    spread = (difference - difference.mean(-1, keepdim=True)).abs()
    return float(spread.max() if flat.dtype == torch.float32 else spread.mean())


def _unsupported(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f'model type {name!r} does not run on generation.engine = "torch": {reason}. '
        "Use a model with plain causal attention (Llama, Qwen2, Qwen3, SmolLM2 and similar models)"
    )
