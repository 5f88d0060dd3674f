"""Models as trainer, reference, critic and reward model see them: hidden states, and a head of logits or numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from asyncrl.engines.loading import load_pretrained, load_pretrained_classifier
from asyncrl.engines.training.packing import PaddedRows, WholeRows
from asyncrl.errors import ConfigError
from asyncrl.models import another_tokenizer

HEAD_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """whole: the transformers model, float32. body: ids [rows, length] -> hidden states. head: of these.

    source_config, tokenizer: as they were read, for checkpoints.
    """

    whole: Any
    body: nn.Module
    head: Callable[[Tensor], Tensor]
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

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalModel(LoadedModel):
    """vocabulary: ids the tokenizer knows; the head's rows beyond it have probability zero. float32_head: it computes
    in float32 whatever the body does."""

    vocabulary: int
    float32_head: bool = False

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, width] -> float32 [tokens, vocabulary]."""
        if self.float32_head:
            return self.head(hidden.float())[..., : self.vocabulary]
        with self._autocast():
            return self.head(hidden)[..., : self.vocabulary].float()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueModel(LoadedModel):
    """A model with one number a token."""

    def values(self, rows: PaddedRows) -> Tensor:
        """float32 [tokens]: of the state before each of the tokens that `rows` names is sampled."""
        return self._numbers(rows.ids, rows.positions)

    def scores(self, rows: WholeRows) -> Tensor:
        """float32 [rows]: of each row at its last token, which its length tells and no comparison with a padding id."""
        return self._numbers(rows.ids, rows.last)

    def _numbers(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The head is float32 whatever the body computes in: bfloat16 would make one score of near ones."""
        return self.head(self.hidden(ids).flatten(0, 1)[positions].float()).squeeze(-1)


def load_causal_model(
    folder: Path, device: str, precision: Literal["float32", "bfloat16"] = "float32", *, float32_head: bool = False
) -> CausalModel:
    """Load from a folder in the layout of `save_pretrained`: float32 weights, no dropout anywhere.

    precision: of the computation; bfloat16 is autocast over the float32 weights, without the head if `float32_head`.
    Raises ConfigError for a model whose logits are not its output layer applied to its last hidden states.
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
        float32_head=float32_head,
        source_config=config,
        tokenizer=tokenizer,
        device=torch.device(device),
        precision=precision,
    )
    _check_head(model, folder)
    return model


def load_value_model(folder: Path, device: str, precision: Literal["float32", "bfloat16"] = "float32") -> ValueModel:
    """Load from a folder in the layout of `save_pretrained`, with transformers' head for token classification and one
    label. What of the head the folder does not have is 0, so that a new one answers 0 until it is trained. Raises
    ConfigError for a model without such a head in transformers, or with another number of labels.
    """
    whole, missing = load_pretrained_classifier(
        folder, AutoModelForTokenClassification, "critic", **_classifier_options(folder)
    )
    for name in missing:
        nn.init.zeros_(whole.get_parameter(name))
    model = _value_model(whole, folder, device, precision)
    _check_head(model, folder)
    return model


def load_score_model(folder: Path, device: str, precision: Literal["float32", "bfloat16"] = "float32") -> ValueModel:
    """Load a reward model, frozen: transformers' head for sequence classification with one label, or a critic's, for
    token classification, read at the last token. No dropout.

    Raises:
        ConfigError: transformers has no such head for the model, it has another number of labels or other inputs than
            the last hidden state of its last token, or the folder holds none.
    """
    token_head = any(name.endswith("ForTokenClassification") for name in _architectures(folder))
    kind = AutoModelForTokenClassification if token_head else AutoModelForSequenceClassification
    whole, missing = load_pretrained_classifier(folder, kind, "reward model", **_classifier_options(folder))
    if missing:
        raise ConfigError(
            f"model {folder} cannot be a reward model: it holds no {', '.join(missing)}, so its scores would be noise; "
            "take a folder that AutoModelForSequenceClassification with num_labels=1 was saved to after training"
        )
    if not hasattr(whole, "score"):
        raise ConfigError(
            f"model {folder} cannot be a reward model: {type(whole).__name__} does not score the state of the last "
            "token; use a Llama, Qwen2 or Qwen3 model"
        )
    whole.config.pad_token_id = None  # One row, which has no padding, is all that its own forward is ever given.
    model = _value_model(whole.eval().requires_grad_(False), folder, device, precision)
    _check_head(model, folder, slice(None) if token_head else slice(-1, None))
    return model


def refuse_another_tokenizer(model: LoadedModel, policy: Path, key: str) -> None:
    """Raises ConfigError unless `model`, which `key` of the config names, means the same by each token id as the policy
    in this folder."""
    if model.tokenizer.get_vocab() != AutoTokenizer.from_pretrained(policy).get_vocab():
        raise ConfigError(another_tokenizer(key))


def _value_model(whole: Any, folder: Path, device: str, precision: Literal["float32", "bfloat16"]) -> ValueModel:
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    config.architectures = [type(whole).__name__]
    return ValueModel(
        whole=whole.to(device),
        body=whole.base_model,
        head=whole.score if hasattr(whole, "score") else whole.classifier,
        source_config=config,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        device=torch.device(device),
        precision=precision,
    )


def _classifier_options(folder: Path) -> dict[str, Any]:
    config = _without_dropout(folder, num_labels=1)
    return {"config": config, "dtype": torch.float32, "attn_implementation": "sdpa"}


def _architectures(folder: Path) -> list[str]:
    return AutoConfig.from_pretrained(folder).architectures or []


def _without_dropout(folder: Path, **changes: Any) -> Any:
    """The ratio of an unchanged policy must be 1: any dropout in the trainer makes it noise."""
    config = AutoConfig.from_pretrained(folder, **changes)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


@torch.no_grad()
def _check_head(model: LoadedModel, folder: Path, tokens: slice = slice(None)) -> None:
    """Some models scale or cap their logits after the head, which only their own forward knows. tokens: those that it
    has logits of."""
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    whole = model.whole(input_ids=ids, use_cache=False).logits
    parts = model.head(model.body(input_ids=ids, use_cache=False).last_hidden_state)[:, tokens].reshape(whole.shape)
    if not torch.allclose(whole, parts, atol=HEAD_TOLERANCE):
        raise ConfigError(
            f"model {folder}: {type(model.whole).__name__} changes its logits after the output layer (a scale or "
            "a soft cap), which the torch engine does not compute; use a Llama, Qwen2 or Qwen3 model"
        )
