"""The texts of the pretraining loss, which the policy must not forget: reads them and chooses those of each update."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.schema import Config
from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.engines.models.model_folder import context_of, longest_row
from asyncrl.engines.training.batch.micro_batches import ModelRows, lay_out_rows
from asyncrl.errors import TaskError
from asyncrl.tasks.prompt_rows import drawn_row


@dataclass(frozen=True, slots=True)
class PretrainingText:
    """Holds the token ids of a text. given: context, at least one token. learnt: tokens in the loss, at least one."""

    given: NDArray[np.int64]
    learnt: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return len(self.given) + len(self.learnt)


def load_pretraining(path: Path, config: Config, model_config: Any, tokenizer: Any) -> list[PretrainingText]:
    """Reads texts from JSON lines and cuts each to the longest row of the run and to the model's context. Raises
    TaskError when a prompt cannot be rendered or leaves no room for its answer, or a text has only one token."""
    longest = longest_row(config, context_of(model_config.to_dict()))
    chats = TokenizerWithStops(tokenizer, (), config.task.template_arguments)
    with path.open(encoding="utf-8") as lines:
        return [
            _tokenize(json.loads(line), tokenizer, chats, longest, f"task.pretrain, row {row + 1}")
            for row, line in enumerate(lines)
        ]


def _tokenize(
    row: dict[str, Any], tokenizer: Any, chats: TokenizerWithStops, longest: int, where: str
) -> PretrainingText:
    """Tokenizes a text, of which all tokens but the first are learnt, or a prompt with an answer, which is learnt. An
    end-of-sequence token follows, unless the row is cut before it."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if "text" in row:
        ids = np.array([*tokenizer(row["text"])["input_ids"], *end], np.int64)
        given = 1
    else:
        prompt = chats.prompt_ids(row["prompt"])
        answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        ids = np.array([*prompt, *answer, *end], np.int64)
        given = len(prompt)
    if given == 0 or given >= min(len(ids), longest):
        raise TaskError(f"{where}: {given} of its {len(ids)} tokens (at most {longest}) are given, none is learnt")
    return PretrainingText(ids[:given], ids[given:longest])


def pad_texts(texts: Sequence[PretrainingText], device: torch.device) -> ModelRows:
    """Pads texts for the model, which predicts what is learnt."""
    return lay_out_rows([text.given for text in texts], [text.learnt for text in texts], 1.0, device)


def texts_of(texts: Sequence[PretrainingText], config: Config, version: int, update: int) -> list[PretrainingText]:
    """Returns the texts of one update of the step from `version`, of `task.pretrain_per_step` a step; every text comes
    once before one repeats. A pure function, so that all ranks and a resumed run choose the same texts."""
    count = config.task.pretrain_per_step
    updates = config.training.updates
    own = range(update * count // updates, (update + 1) * count // updates)
    return [texts[drawn_row(config.seed, version * count + place, len(texts))] for place in own]
