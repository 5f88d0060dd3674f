"""The pretraining loss: cross-entropy of texts that the policy shall not forget, beside the loss of its samples.

PPO-ptx (arXiv 2203.02155, section 3.5, gamma E[log pi(x)]) and Safe RLHF (arXiv 2310.12773, appendix B, L^PTX).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config import Config
from asyncrl.context import context_of, longest_row
from asyncrl.engines.generation.text import Texts
from asyncrl.engines.training.logprobs import token_logprobs
from asyncrl.engines.training.model import CausalModel
from asyncrl.engines.training.packing import pad_rows
from asyncrl.errors import TaskError
from asyncrl.tasks.draw import drawn_row


@dataclass(frozen=True, slots=True)
class Text:
    """given: token ids that are not learnt, at least one. learnt: those that follow, at least one."""

    given: NDArray[np.int64]
    learnt: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return len(self.given) + len(self.learnt)


@dataclass(frozen=True, slots=True)
class Pretraining:
    """coefficient: of the loss. per_step: texts of one step, of which each of its updates takes as many."""

    texts: Sequence[Text]
    coefficient: float
    per_step: int
    seed: int


def load_pretraining(path: Path, config: Config, model: CausalModel) -> Pretraining:
    """The texts that were written to `path`, each up to as many tokens as the longest prompt and answer have together,
    and no more than the model has positions.

    Raises:
        TaskError: the prompt of one cannot be rendered, or has no room for an answer; or a text has only one token.
    """
    longest = longest_row(config, context_of(model.source_config.to_dict()))
    with path.open(encoding="utf-8") as lines:
        texts = [
            _tokenized(json.loads(line), model.tokenizer, longest, f"task.pretrain, row {row}")
            for row, line in enumerate(lines)
        ]
    algorithm = config.algorithm
    return Pretraining(texts, algorithm.pretrain_coefficient, config.task.pretrain_per_step, config.seed)


def _tokenized(row: dict[str, Any], tokenizer: Any, longest: int, where: str) -> Text:
    """Of a text all tokens but the first are learnt; of prompt and answer those of the answer. Both end with the end of
    sequence, unless they are cut."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if "text" in row:
        ids = np.array([*tokenizer(row["text"])["input_ids"], *end], np.int64)
        given = 1
    else:
        prompt = Texts(tokenizer, ()).prompt_ids(row["prompt"])
        answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        ids, given = np.array([*prompt, *answer, *end], np.int64), len(prompt)
    if given == 0 or given >= min(len(ids), longest):
        raise TaskError(f"{where}: {given} of its {len(ids)} tokens (at most {longest}) are given, none is learnt")
    return Text(ids[:given], ids[given:longest])


def texts_of(pretraining: Pretraining | None, version: int, update: int, updates: int) -> list[Text]:
    """Those of one update of the step from `version`: a pure function, the same on every rank, so that a resume needs
    no sampler state. Every text comes once before one comes again."""
    if pretraining is None:
        return []
    count, rows = pretraining.per_step, len(pretraining.texts)
    own = range(update * count // updates, (update + 1) * count // updates)
    return [pretraining.texts[drawn_row(pretraining.seed, version * count + place, rows)] for place in own]


def pretraining_loss(model: CausalModel, texts: Sequence[Text], tokens: int, chunk: int) -> Tensor:
    """-sum of log pi(token | those before it) / tokens, over the learnt tokens of these texts, with gradient.

    tokens: learnt ones of all texts of the update, those of other micro-batches and ranks among them.
    """
    given, learnt = [text.given for text in texts], [text.learnt for text in texts]
    rows = pad_rows(given, learnt, [1.0] * len(texts), model.device)
    return -token_logprobs(model, rows, chunk).logprobs.sum() / tokens
