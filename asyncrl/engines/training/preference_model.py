"""Fits a reward model to preferences (Bradley and Terry 1952; Ouyang et al., arXiv 2203.02155, section 3.5).

ComparedPrompt ──> score of each answer at its last token ──> loss of each pair of a prompt ──> AdamW
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils import logging

from asyncrl.engines.models.model_loading import load_pretrained_classifier
from asyncrl.engines.training.models_with_heads import ValueModel, refuse_another_tokenizer
from asyncrl.objectives.losses import bradley_terry_loss
from asyncrl.objectives.pass_at_k import Rate, rate_over
from asyncrl.rewards.feedback.pairs import EQUAL, ComparedPrompt, batches

CENTERING = 0.01
"""Weight of the squared mean score of a pair, which holds scores around 0: the loss leaves their level open, and what
stands in for a person is sigmoid(score)."""
PROMPTS_AT_ONCE = 8
"""Prompts of one optimizer step, with up to 16 answers each."""
MOST_TOKENS = 1024
"""Tokens of a conversation, the last ones: those that bound the memory of a step."""

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of held-out pairs whose better answer has the higher score, with its interval. rate: over prompts,
    which count alike, for the pairs of one prompt share answers."""

    rate: Rate
    pairs: int
    prompts: int

    def __str__(self) -> str:
        mean, low, high = self.rate
        return f"{mean:.3f} (95 %: {low:.3f} to {high:.3f}) over {self.pairs} pairs of {self.prompts} prompts"


class PreferenceModel:
    """A model from `folder`, a language model or an earlier reward model, that scores answers. A new head gives 0."""

    def __init__(self, folder: Path, learning_rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self._folder = folder
        config = AutoConfig.from_pretrained(folder, num_labels=1)
        options = {"config": config, "dtype": torch.float32}
        kind = AutoModelForSequenceClassification
        whole, missing = load_pretrained_classifier(folder, kind, "reward model", **options)
        for name in missing:
            nn.init.zeros_(whole.get_parameter(name))
        whole.config.pad_token_id = None  # Its own forward gets one row, which has no padding.
        self._model = ValueModel(whole.train(), folder, "float32", slice(-1, None))
        self._optimizer = torch.optim.AdamW(whole.parameters(), lr=learning_rate, weight_decay=0.0)
        self._draw = random.Random(seed)

    def refuse_tokenizer_besides(self, policy: Path) -> None:
        """Raises ConfigError unless the model reads tokens as the policy in this folder does."""
        refuse_another_tokenizer(self._model, policy, f"{self._folder} cannot learn from samples of {policy}")

    def fit(self, prompts: Sequence[ComparedPrompt], passes: int, show: Show) -> None:
        """Trains on all pairs `passes` times; each prompt counts alike, however many pairs it has."""
        for number in range(1, passes + 1):
            shuffled = list(prompts)
            self._draw.shuffle(shuffled)
            losses = [self._step(batch) for batch in batches(shuffled, PROMPTS_AT_ONCE)]
            show(f"pass {number} of {passes}: loss {sum(losses) / len(losses):.3f} (0.693 by chance)")

    def _step(self, prompts: Sequence[ComparedPrompt]) -> float:
        better, other, wins, shares = self._scored(prompts)
        loss = (shares * bradley_terry_loss(better, other, wins)).sum()
        centered = loss + CENTERING * (shares * ((better + other) / 2).square()).sum()
        self._optimizer.zero_grad()
        torch.autograd.backward(centered)
        torch.nn.utils.clip_grad_norm_(self._model.whole.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.item())

    def _scored(self, prompts: Sequence[ComparedPrompt]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns of each pair both scores, who wins, and its share in the loss. Each answer is computed once."""
        rows = [np.array(answer.tokens[-MOST_TOKENS:]) for each in prompts for answer in each.answers]
        scores = self._model.scores(rows)
        starts = np.cumsum([0, *(len(each.answers) for each in prompts)])
        pairs = [(int(start), each, pair) for start, each in zip(starts, prompts, strict=False) for pair in each.pairs]
        first = scores[[start + pair.first for start, _, pair in pairs]]
        second = scores[[start + pair.second for start, _, pair in pairs]]
        wins = torch.tensor([pair.wins for _, _, pair in pairs])
        return first, second, wins, torch.tensor([1 / (len(each.pairs) * len(prompts)) for _, each, _ in pairs])

    @torch.no_grad()
    def accuracy(self, prompts: Sequence[ComparedPrompt]) -> Accuracy:
        """Compares scores with decided pairs, of which there must be one; equal scores count half."""
        shares: list[float] = []
        for prompt in prompts:
            better, other, wins, _ = self._scored([prompt])
            difference = (better - other)[wins != EQUAL]
            if len(difference):
                shares.append((float((difference > 0).sum()) + float((difference == 0).sum()) / 2) / len(difference))
        return Accuracy(rate_over(shares), sum(each.decided for each in prompts), len(shares))

    def save(self, folder: Path) -> None:
        """Writes the model and its tokenizer, for `reward.model`."""
        logging.disable_progress_bar()
        self._model.whole.save_pretrained(folder)
        self._model.source_config.save_pretrained(folder)
        self._model.tokenizer.save_pretrained(folder)
