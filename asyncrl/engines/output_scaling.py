"""Scales and soft caps that some families put on the logits behind the output layer."""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True, slots=True)
class OutputScaling:
    """factor: logits are multiplied with it (Cohere's logit_scale, 1 / Granite's logits_scaling). cap: logits x become
    cap x tanh(x / cap) (Gemma 2, arXiv 2408.00118); None: they stay."""

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Self:
        """Reads it from a config of transformers."""
        shape = config.get_text_config()
        factor = (getattr(shape, "logit_scale", None) or 1.0) / (getattr(shape, "logits_scaling", None) or 1.0)
        return cls(factor, getattr(shape, "final_logit_softcapping", None))

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the scaled logits; the same tensor where nothing is to be done."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap
