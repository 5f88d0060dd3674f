"""Log-probs of response tokens. The one place where trainer and reference compute them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncrl.engines.training.model import CausalModel
from asyncrl.engines.training.packing import PaddedRows, pad_rows


class TokenLogprobs(NamedTuple):
    """Both float32 [tokens]: log-softmax(logits / temperature) at the sampled token; entropy of the distribution."""

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(
    model: CausalModel, rows: PaddedRows, chunk: int, *, entropy_gradient: bool = False
) -> TokenLogprobs:
    """Log-probs of all response tokens, with gradient where grad mode is on; entropy without one unless asked for.

    The head works on `chunk` tokens at a time, so that no [tokens, vocabulary] tensor of more than one chunk exists: it
    is computed again in the backward pass, unless all tokens fit into one.
    """
    states = model.hidden(rows.ids).flatten(0, 1)[rows.positions]
    parts = [
        _chunk_logprobs(model, *inputs, keep=len(states) <= chunk, entropy_gradient=entropy_gradient)
        for inputs in zip(*(torch.split(v, chunk) for v in (states, rows.targets, rows.temperatures)), strict=True)
    ]
    return TokenLogprobs(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


def _chunk_logprobs(
    model: CausalModel, states: Tensor, targets: Tensor, temperatures: Tensor, *, keep: bool, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    def head(states: Tensor) -> tuple[Tensor, Tensor]:
        everything = (model.logits(states) / temperatures[:, None]).log_softmax(-1)
        chosen = everything.gather(-1, targets[:, None]).squeeze(-1)
        return chosen, _entropy(everything if entropy_gradient else everything.detach())

    if keep or not torch.is_grad_enabled():
        return head(states)
    answer: tuple[Tensor, Tensor] = checkpoint(head, states, use_reentrant=False, preserve_rng_state=False)
    return answer


def _entropy(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


@torch.no_grad()
def logprobs_after(model: CausalModel, prompt: NDArray[np.int64]) -> Tensor:
    """float32 [vocabulary]: of the token that follows these ids, at temperature 1, without gradient."""
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
    """Log-probs [tokens] of each row, without gradient, in one forward pass.

    The bits of a row depend on what else is in the pass; a single row's never do.
    """
    rows = pad_rows(prompts, responses, temperatures, model.device)
    values = token_logprobs(model, rows, chunk).logprobs.cpu().numpy()
    ends = np.cumsum([len(response) for response in responses])
    return np.split(values, ends[:-1])
