"""Which models the torch engine runs: those whose attention is plain and causal. Others are refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.engines.generation.cache import Ints
from asyncrl.engines.generation.forward import NOTHING, FlatModel, Whole
from asyncrl.engines.loading import load_pretrained
from asyncrl.engines.probe import PROBE_TOKENS
from asyncrl.errors import ConfigError

PROBE_WHOLE = 8  # of the probe at once, before single steps
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Nats: far over rounding, far under a wrong mask. Of the worst log-prob in float32; of their mean in bfloat16, where
those of single unlikely tokens are rounded by more."""


def load_model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """A model for sampling only, refused when its attention is not plain.

    Raises:
        ConfigError: names the setting and what to use instead.
    """
    model = load_pretrained(folder, dtype=dtype)
    refuse_unsupported(model.config)
    return model.to(device).eval().requires_grad_(False)


def refuse_unsupported(config: Any) -> None:
    """Look for what this engine's attention would silently leave out."""
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
    """Log-probabilities of the model's own forward over `ids` of `probe_ids`, before its attention is replaced."""
    with torch.no_grad():
        tokens = torch.from_numpy(ids).to(model.device)
        logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0, PROBE_WHOLE - 1 :]
    return logits.float().log_softmax(-1)


def verify(flat: FlatModel, ids: Ints, expected: torch.Tensor) -> None:
    """Compare `expected` (probe_logprobs) with the flat forward, whole and token by token: what no setting tells. A
    forward that is written out and differs gives way to the model's own.

    Raises:
        ConfigError: that one differs too, by more than rounding does.
    """
    tolerance = PROBE_TOLERANCE[flat.dtype]
    found = _spread(flat, ids, expected)
    if not found <= tolerance and flat.direct is not None:
        flat.direct = None
        found = _spread(flat, ids, expected)
    if not found <= tolerance:
        reason = f"its logits differ by {found:.2g} from transformers' own forward, so its attention is not plain"
        raise _unsupported(flat.model.config.model_type, reason)


def _spread(flat: FlatModel, ids: Ints, expected: torch.Tensor) -> float:
    """How far log-probabilities are apart, as PROBE_TOLERANCE counts it; common offsets aside."""
    found = [flat.logits(NOTHING, NOTHING, [Whole(0, ids[:PROBE_WHOLE])])]
    for position in range(PROBE_WHOLE, PROBE_TOKENS):
        found.append(flat.logits(ids[position : position + 1], np.array([position])))
    real = torch.isfinite(found[0][0])
    difference = (torch.cat(found).float()[:, real] - expected[:, real]).float()
    apart = (difference - difference.mean(-1, keepdim=True)).abs()
    return float(apart.max() if flat.dtype == torch.float32 else apart.mean())


def _unsupported(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f'model type {name!r} does not run on generation.engine = "torch": {reason}. '
        "Use a model with plain causal attention (Llama, Qwen2, Qwen3, SmolLM2 and their kin)"
    )
