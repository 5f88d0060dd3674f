"""The pretraining loss: cross-entropy on texts that the policy must not forget, added to the policy loss.

Sources: PPO-ptx (arXiv 2203.02155, section 3.5, gamma E[log pi(x)]); Safe RLHF (arXiv 2310.12773, appendix B, L^PTX).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.engines.models.folder_checks import context_of, longest_row
from asyncrl.engines.training.batch.packing import pad_rows
from asyncrl.engines.training.loss.logprobs import token_logprobs
from asyncrl.engines.training.state.models_with_heads import CausalModel
from asyncrl.errors import TaskError
from asyncrl.tasks.prompt_draw import drawn_row


@dataclass(frozen=True, slots=True)
class PretrainingText:
    """Holds the token ids of a text. given: context, at least one token. learnt: tokens in the loss, at least one."""

    given: NDArray[np.int64]
    learnt: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return len(self.given) + len(self.learnt)


@dataclass(frozen=True, slots=True)
class PretrainingTexts:
    """Holds all texts. coefficient: of the loss. per_step: texts per step, split evenly over its updates."""

    texts: Sequence[PretrainingText]
    coefficient: float
    per_step: int
    seed: int


def load_pretraining(path: Path, config: Config, model: CausalModel) -> PretrainingTexts:
    """Reads texts from JSON lines and cuts each to the longest row of the run and to the model's context.

    Raises:
        TaskError: a prompt cannot be rendered or leaves no room for its answer, or a text has only one token.
    """
    longest = longest_row(config, context_of(model.source_config.to_dict()))
    with path.open(encoding="utf-8") as lines:
        texts = [
            _tokenize(json.loads(line), model.tokenizer, longest, f"task.pretrain, row {row}")
            for row, line in enumerate(lines)
        ]
    algorithm = config.algorithm
    return PretrainingTexts(texts, algorithm.pretrain_coefficient, config.task.pretrain_per_step, config.seed)


def _tokenize(row: dict[str, Any], tokenizer: Any, longest: int, where: str) -> PretrainingText:
    """Tokenizes a text, of which all tokens but the first are learnt, or a prompt with an answer, which is learnt.

    An end-of-sequence token follows, unless the row is cut before it.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if "text" in row:
        ids = np.array([*tokenizer(row["text"])["input_ids"], *end], np.int64)
        given = 1
    else:
        prompt = TokenizerWithStops(tokenizer, ()).prompt_ids(row["prompt"])
        answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        ids, given = np.array([*prompt, *answer, *end], np.int64), len(prompt)
    if given == 0 or given >= min(len(ids), longest):
        raise TaskError(f"{where}: {given} of its {len(ids)} tokens (at most {longest}) are given, none is learnt")
    return PretrainingText(ids[:given], ids[given:longest])


def texts_of(pretraining: PretrainingTexts | None, version: int, update: int, updates: int) -> list[PretrainingText]:
    """Returns the texts of one update of the step from `version`; every text comes once before one repeats.

    The choice is a pure function, equal on all ranks, so that a resumed run needs no sampler state.
    """
    if pretraining is None:
        return []
    count, rows = pretraining.per_step, len(pretraining.texts)
    own = range(update * count // updates, (update + 1) * count // updates)
    return [pretraining.texts[drawn_row(pretraining.seed, version * count + place, rows)] for place in own]


def pretraining_loss(model: CausalModel, texts: Sequence[PretrainingText], tokens: int, chunk: int) -> Tensor:
    """Computes -sum of log pi(token | earlier tokens) / tokens over the learnt tokens of these texts, with gradient.

    tokens: number of learnt tokens of the whole update, over all micro-batches and ranks.
    """
    given, learnt = [text.given for text in texts], [text.learnt for text in texts]
    rows = pad_rows(given, learnt, [1.0] * len(texts), model.device)
    return -token_logprobs(model, rows, chunk).logprobs.sum() / tokens
