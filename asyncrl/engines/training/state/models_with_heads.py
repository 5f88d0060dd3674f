"""Models with their heads, for trainer, reference, critic and reward model: logits, or one number per token."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from asyncrl.engines.model_loading import load_pretrained, load_pretrained_classifier
from asyncrl.engines.models.folder_checks import another_tokenizer
from asyncrl.engines.training.batch.packing import PaddedRows, PaddedSequences
from asyncrl.errors import ConfigError

HEAD_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Holds a transformers model split into body and head.

    whole: the model with float32 weights. body: maps ids [rows, length] to hidden states. head: maps hidden states to
    the output. source_config, tokenizer: as loaded, for checkpoints. precision: of the computation.
    """

    whole: Any
    body: nn.Module
    head: Callable[[Tensor], Tensor]
    source_config: Any
    tokenizer: Any
    device: torch.device
    precision: Literal["float32", "bfloat16"]

    def hidden(self, ids: Tensor) -> Tensor:
        """Computes hidden states [rows, length, width] of ids [rows, length].

        Rows are right-padded: under causal attention no real token sees the padding, so no mask is needed.
        """
        with self._autocast():
            states: Tensor = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalModel(LoadedModel):
    """A language model. vocabulary: number of ids of the tokenizer; head rows beyond it get probability 0.

    float32_head: the head computes in float32 even where the body computes in bfloat16.
    """

    vocabulary: int
    float32_head: bool = False

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [tokens, width] to logits, float32 [tokens, vocabulary]."""
        if self.float32_head:
            return self.head(hidden.float())[..., : self.vocabulary]
        with self._autocast():
            return self.head(hidden)[..., : self.vocabulary].float()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueModel(LoadedModel):
    """A model with one output number per token: a critic or a reward model."""

    def values(self, rows: PaddedRows) -> Tensor:
        """Returns the value of the state before each response token is sampled, float32 [tokens]."""
        return self._numbers(rows.ids, rows.positions)

    def scores(self, rows: PaddedSequences) -> Tensor:
        """Returns the score of each row at its last token, float32 [rows]; the row length tells which token is last."""
        return self._numbers(rows.ids, rows.last)

    def _numbers(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Applies the head in float32, because bfloat16 would round close scores to the same number."""
        return self.head(self.hidden(ids).flatten(0, 1)[positions].float()).squeeze(-1)


def load_causal_model(
    folder: Path, device: str, precision: Literal["float32", "bfloat16"] = "float32", *, float32_head: bool = False
) -> CausalModel:
    """Loads a language model in float32 and without dropout from a `save_pretrained` folder.

    precision: bfloat16 is autocast over the float32 weights, except for the head with `float32_head`.

    Raises:
        ConfigError: the logits of the model are not its output layer applied to its last hidden states.
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
    """Loads a critic with transformers' token classification head and one label.

    Head parameters that the folder lacks are set to 0, so that a new head outputs 0 until it is trained.

    Raises:
        ConfigError: transformers has no such head for the model, or the head has another number of labels.
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
    """Loads a frozen reward model without dropout, which scores the last token of a row.

    The head is transformers' sequence classification head with one label, or the token classification head of a critic.

    Raises:
        ConfigError: transformers has no such head for the model, the folder holds no head, the head has another number
            of labels, or it reads something else than the last hidden state of the last token.
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
    whole.config.pad_token_id = None  # Its own forward only ever gets one row, which has no padding.
    model = _value_model(whole.eval().requires_grad_(False), folder, device, precision)
    _check_head(model, folder, slice(None) if token_head else slice(-1, None))
    return model


def refuse_another_tokenizer(model: LoadedModel, policy: Path, key: str) -> None:
    """Raises ConfigError unless `model` has the vocabulary of the policy; `key` names the model in the config."""
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
    """Reads the config with all dropout set to 0: dropout would make the ratio of an unchanged policy differ from 1."""
    config = AutoConfig.from_pretrained(folder, **changes)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


@torch.no_grad()
def _check_head(model: LoadedModel, folder: Path, tokens: slice = slice(None)) -> None:
    """Raises ConfigError when the model's own forward changes its logits after the head, by a scale or a soft cap.

    tokens: the tokens that the forward has logits of.
    """
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    logits = model.whole(input_ids=ids, use_cache=False).logits
    ours = model.head(model.body(input_ids=ids, use_cache=False).last_hidden_state)[:, tokens].reshape(logits.shape)
    if not torch.allclose(logits, ours, atol=HEAD_TOLERANCE):
        raise ConfigError(
            f"model {folder}: {type(model.whole).__name__} changes its logits after the output layer (a scale or "
            "a soft cap), which the torch engine does not compute; use a Llama, Qwen2 or Qwen3 model"
        )
