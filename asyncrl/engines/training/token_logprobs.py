"""Log-probs of response tokens; trainer and reference compute them only here."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncrl.engines.training.batch.micro_batches import PaddedRows, pad_rows, split_by_row
from asyncrl.engines.training.models_with_heads import CausalModel


class TokenLogprobs(NamedTuple):
    """Holds log-probs and entropies, float32 [tokens].

    logprobs: log-softmax(logits / temperature) at the response token. entropy: of that distribution.
    """

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(
    model: CausalModel, rows: PaddedRows, chunk: int, *, entropy_gradient: bool = False
) -> TokenLogprobs:
    """Computes log-probs, with gradient in grad mode, and entropies, with gradient only on request.

    The head processes `chunk` tokens at a time, so that no larger [tokens, vocabulary] tensor exists. The backward pass
    recomputes the head, unless all tokens fit into one chunk.
    """

    def head(states: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = (model.logits(states) / temperatures[:, None]).log_softmax(-1)
        for_entropy = logprobs if entropy_gradient else logprobs.detach()
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(for_entropy.exp() * for_entropy).sum(-1)

    states = model.hidden(rows.ids).flatten(0, 1)[rows.positions]
    parts: list[tuple[Tensor, Tensor]] = []
    for inputs in zip(*(torch.split(v, chunk) for v in (states, rows.targets, rows.temperatures)), strict=True):
        if len(states) <= chunk or not torch.is_grad_enabled():
            parts.append(head(*inputs))
        else:
            parts.append(checkpoint(head, *inputs, use_reentrant=False, preserve_rng_state=False))
    return TokenLogprobs(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


@torch.no_grad()
def logprobs_after(model: CausalModel, prompt: NDArray[np.int64]) -> Tensor:
    """Returns the log-probs of the token after the prompt at temperature 1, float32 [vocabulary]."""
    ids = torch.from_numpy(prompt).to(model.device)
    return model.logits(model.hidden(ids[None])[0, -1:])[0].log_softmax(-1)


@torch.no_grad()
def frozen_logprobs(
    model: CausalModel,
    prompts: Sequence[NDArray[np.int64]],
    responses: Sequence[NDArray[np.int64]],
    temperatures: Sequence[float],
    chunk: int,
) -> list[NDArray[np.float32]]:
    """Computes the log-probs [tokens] of each row in one forward pass, without gradient.

    The bits of a row depend on the other rows of the pass; a pass over a single row always gives the same bits.
    """
    rows = pad_rows(prompts, responses, temperatures, model.device)
    return split_by_row(token_logprobs(model, rows, chunk).logprobs, [len(response) for response in responses])
