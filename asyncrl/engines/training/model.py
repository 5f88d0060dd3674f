"""A causal language model as trainer and reference see it: hidden states, head, known vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from asyncrl.engines.loading import load_pretrained
from asyncrl.errors import ConfigError

HEAD_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class CausalModel:
    """whole: the transformers model, float32. body: ids [rows, length] -> hidden states. head: hidden -> logits.

    vocabulary: ids the tokenizer knows; the head's rows beyond it have probability zero. source: the model's
    own config and tokenizer, written to checkpoints as they were read.
    """

    whole: Any
    body: nn.Module
    head: Callable[[Tensor], Tensor]
    vocabulary: int
    source_config: Any
    tokenizer: Any
    device: torch.device
    precision: Literal["float32", "bfloat16"]

    def hidden(self, ids: Tensor) -> Tensor:
        """[rows, length] -> [rows, length, width]. Rows are right-padded: under causal attention no real token
        sees the padding, so no mask is needed."""
        with self._autocast():
            states: Tensor = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, width] -> float32 [tokens, vocabulary]."""
        with self._autocast():
            return self.head(hidden)[..., : self.vocabulary].float()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")


def load_causal_model(folder: Path, device: str, precision: Literal["float32", "bfloat16"] = "float32") -> CausalModel:
    """Load from a folder in the layout of `save_pretrained`: float32 weights, no dropout anywhere.

    precision: of the computation; bfloat16 is autocast over the float32 weights. Raises ConfigError for a model
    whose logits are not its output layer applied to its last hidden states.
    """
    config = AutoConfig.from_pretrained(folder)
    whole = load_pretrained(
        folder, config=_without_dropout(folder), dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = min(len(tokenizer), whole.get_output_embeddings().weight.shape[0])
    model = CausalModel(
        whole=whole,
        body=whole.base_model,
        head=whole.get_output_embeddings(),
        vocabulary=known,
        source_config=config,
        tokenizer=tokenizer,
        device=torch.device(device),
        precision=precision,
    )
    _check_head(model, folder)
    return model


def _without_dropout(folder: Path) -> Any:
    """The ratio of an unchanged policy must be 1: any dropout in the trainer makes it noise."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


@torch.no_grad()
def _check_head(model: CausalModel, folder: Path) -> None:
    """Some models scale or cap their logits after the head, which only their own forward knows."""
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    whole = model.whole(input_ids=ids, use_cache=False).logits
    parts = model.head(model.body(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(whole, parts, atol=HEAD_TOLERANCE):
        raise ConfigError(
            f"model {folder}: {type(model.whole).__name__} changes its logits after the output layer (a scale or "
            "a soft cap), which the torch engine does not compute; use a Llama, Qwen2 or Qwen3 model"
        )
