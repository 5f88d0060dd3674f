"""Log-probs of sampled tokens; trainer and reference compute them only here."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncrl.engines.pictures.prompt_pictures import PromptPictures
from asyncrl.engines.training.batch.contexts import Spans
from asyncrl.engines.training.batch.micro_batches import Experts, ModelInput, ModelRows, lay_out_rows, split_by_row
from asyncrl.engines.training.batch.train_rows import Ids, TrainRow
from asyncrl.engines.training.models_with_heads import CausalModel
from asyncrl.engines.training.ranks.pipeline import Ending
from asyncrl.engines.training.ranks.sequence_parallel import joined


def token_logprobs(
    model: CausalModel, rows: ModelRows, chunk: int, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes log-probs of the sampled tokens, with gradient in grad mode, and entropies, with gradient only on
    request, of log-softmax(logits / temperature), float32 [tokens].

    The head processes `chunk` tokens at a time, so that no larger [tokens, vocabulary] tensor exists. The backward pass
    recomputes the head, unless all tokens fit into one chunk.
    """

    def compute() -> tuple[Tensor, Tensor]:
        own = rows
        chosen = None
        ranks = model.sequence
        if ranks is not None:
            own, chosen = own_slice(rows, ranks.rank, ranks.size)
        found = head_logprobs(model, model.states(own), own, chunk, entropy_gradient=entropy_gradient)
        return found if ranks is None or chosen is None else joined(found, chosen, ranks)

    return model.in_pass(compute)


def head_logprobs(
    model: CausalModel, states: Tensor, rows: ModelRows, chunk: int, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes what `token_logprobs` returns from the states [tokens, width] that predict the tokens."""

    def head(states: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = (model.logits(states) / temperatures[:, None]).log_softmax(-1)
        for_entropy = logprobs if entropy_gradient else logprobs.detach()
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(for_entropy.exp() * for_entropy).sum(-1)

    parts: list[tuple[Tensor, Tensor]] = []
    for inputs in zip(*(torch.split(v, chunk) for v in (states, rows.targets, rows.temperatures)), strict=True):
        if len(states) <= chunk or not torch.is_grad_enabled():
            parts.append(head(*inputs))
        else:
            parts.append(checkpoint(head, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def run_stages(model: CausalModel, batches: Sequence[ModelRows], ending: Ending, *, backward: bool) -> None:
    """Runs micro-batches through the pipeline whose stage the model is. ending: computes the loss of a micro-batch, or
    keeps what is wanted, at the last stage, from the states that predict its tokens."""
    assert model.pipeline is not None, "the model is a stage of a pipeline"
    passes = [batch.passes[0] for batch in batches]

    def body(number: int, received: Tensor | None) -> Tensor:
        return model.stage_states(passes[number], received)

    def of_tokens(number: int, states: Tensor) -> Tensor:
        return ending(number, states[passes[number].positions])

    model.pipeline.run([each.ids.numel() for each in passes], body, of_tokens, backward=backward)


@torch.no_grad()
def frozen_stage_logprobs(
    model: CausalModel, parts: Sequence[Sequence[TrainRow]], chunk: int
) -> list[NDArray[np.float32]]:
    """Computes the log-probs [tokens] of the rows of all micro-batches in one run through the stages, which all get
    them."""
    assert model.pipeline is not None, "the model is a stage of a pipeline"
    batches = [_laid_out(rows, model) for rows in parts]
    found = [torch.zeros(len(batch.targets), device=model.device) for batch in batches]

    def keep(number: int, states: Tensor) -> Tensor:
        found[number], _ = head_logprobs(model, states, batches[number], chunk)
        return torch.zeros(1, device=model.device)

    run_stages(model, batches, keep, backward=False)
    rows = [row for part in parts for row in part]
    logprobs = model.pipeline.from_last(torch.cat([torch.zeros(0, device=model.device), *found]))
    return split_by_row(logprobs, [row.response_ids for row in rows], [row.spans for row in rows]) if rows else []


def _laid_out(rows: Sequence[TrainRow], model: CausalModel) -> ModelRows:
    prompts = [row.prompt_ids for row in rows]
    responses = [row.response_ids for row in rows]
    temperatures = [row.temperature for row in rows]
    spans = [row.spans for row in rows]
    return lay_out_rows(prompts, responses, temperatures, model.device, model.packs, spans)


def idle_pass(model: CausalModel, *, backward: bool) -> None:
    """Computes one token that counts for nothing, while other ranks have rows: ranks that share out the weights gather
    them together in every pass."""
    token = np.zeros(1, np.int64)
    with torch.set_grad_enabled(backward):
        logprobs, _ = token_logprobs(model, lay_out_rows([token], [token], 1.0, model.device), 1)
    if backward:
        model.backward(0.0 * logprobs.sum())


@torch.no_grad()
def logprobs_after(model: CausalModel, prompt: NDArray[np.int64]) -> Tensor:
    """Returns the log-probs of the token after the prompt at temperature 1, float32 [vocabulary]."""
    if model.pipeline is not None:
        return _logprobs_of_stages(model, prompt)
    ids = torch.from_numpy(prompt).to(model.device)
    return model.in_pass(lambda: model.logits(model.hidden(ids[None])[0, -1:])[0].log_softmax(-1))


def _logprobs_of_stages(model: CausalModel, prompt: NDArray[np.int64]) -> Tensor:
    assert model.pipeline is not None
    found = torch.zeros(model.vocabulary, device=model.device)

    def keep(_: int, states: Tensor) -> Tensor:
        found.copy_(model.logits(states)[0].log_softmax(-1))
        return torch.zeros(1, device=model.device)

    run_stages(model, [lay_out_rows([prompt], [prompt[:1]], 1.0, model.device)], keep, backward=False)
    return model.pipeline.from_last(found)


def frozen_row_logprobs(
    model: CausalModel, rows: Sequence[TrainRow], chunk: int, budget: float, *, replayed: bool
) -> list[NDArray[np.float32]]:
    """Returns what `frozen_logprobs` does for rows of training. replayed: with the experts that they have recorded."""
    experts = [row.experts for row in rows] if replayed else []
    prompts = [row.prompt_ids for row in rows]
    responses = [row.response_ids for row in rows]
    temperatures = [row.temperature for row in rows]
    spans = [row.spans for row in rows]
    own = (temperatures, chunk, spans, budget, experts)
    pictures = [row.pictures for row in rows]
    return frozen_logprobs(model, prompts, responses, *own, pictures)


@torch.no_grad()
def frozen_logprobs(
    model: CausalModel,
    prompts: Sequence[Ids],
    responses: Sequence[Ids],
    temperatures: Sequence[float],
    chunk: int,
    spans: Sequence[Spans] | None = None,
    budget: float = math.inf,
    experts: Sequence[Experts] = (),
    pictures: Sequence[PromptPictures | None] = (),
) -> list[NDArray[np.float32]]:
    """Computes the log-probs [tokens] of each row, without gradient, together, so that their bits depend on all
    these rows. spans, budget, experts, pictures: see `lay_out_rows`."""
    device = model.device
    packs = model.packs
    rows = lay_out_rows(prompts, responses, temperatures, device, packs, spans, budget, experts, pictures)
    logprobs, _ = token_logprobs(model, rows, chunk)
    return split_by_row(logprobs, responses, spans)


def own_slice(rows: ModelRows, rank: int, size: int) -> tuple[ModelRows, Tensor]:
    """Returns the slice of each pass that this rank computes, and which of the targets, bool [tokens], it predicts.
    Packed rows are not cut."""
    cut = [_slice_of_pass(each, rank, size) for each in rows.passes]
    own = torch.cat([inside for _, inside in cut])
    chosen = own
    order = rows.order
    if order is not None:
        chosen = own[order]
        order = (own.cumsum(0) - 1)[order[chosen]]
    passes = tuple(each for each, _ in cut)
    return ModelRows(passes, rows.targets[chosen], rows.temperatures[chosen], order), chosen


def _slice_of_pass(rows: ModelInput, rank: int, size: int) -> tuple[ModelInput, Tensor]:
    """Returns the slice, and which of the positions are inside it."""
    assert rows.attention is None, "packed rows are not cut"
    length = rows.ids.shape[1]
    width = -(-length // size)
    first = rank * width
    row = rows.positions // length
    column = rows.positions % length
    inside = column // width == rank
    positions = (row * width + column - first)[inside]
    ids = torch.nn.functional.pad(rows.ids, (0, size * width - length))[:, first : first + width]
    position_ids = torch.arange(first, first + width, device=ids.device)[None]
    return replace(rows, ids=ids, positions=positions, position_ids=position_ids), inside
