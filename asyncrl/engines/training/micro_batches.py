"""From the rows of a batch to the forward passes of a model.

rows ── mask_rows ──> what of each enters the loss ── micro_batches ──> rows of similar length
     ── lay_out_rows ──> tensors of a pass, packed or padded ── micro_batch ──> tensors of a loss, flat, row after row
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_families import shared_from
from asyncrl.engines.models.picture_input import PictureInput
from asyncrl.engines.training.packed_rows import PackedAttention, pack_rows
from asyncrl.engines.training.train_rows import (
    Context,
    Ids,
    ModelRow,
    TrainRow,
    contexts_of,
    model_rows,
    padded_sizes,
)
from asyncrl.objectives.ragged import Ragged
from asyncrl.protocols.batch import Batch
from asyncrl.protocols.messages import LEFT_OUT, TrainedSample
from asyncrl.protocols.staleness import POLICIES, Policy

# Masks response tokens out of the loss, and counts them. This module alone enforces the staleness limit.


SHOWN_DIGITS = 4
"""Decimal digits of numbers that are shown."""


@dataclass(slots=True)
class MaskedRow:
    """Holds a row with its mask, and what the step adds to it; arrays are [tokens].

    live: True for tokens that may enter the loss; `live_tokens` counts them. counted: the row enters the denominators
    of the loss. staleness: in versions. The step of the policy sets advantages (what the loss multiplies each token
    with), weight (of each token in the loss of its update), proximal (log-probs at the start of the step) and rejected
    (live tokens that a correction gave the weight 0); that of a critic sets returns. Both set in_loss, tokens in a loss
    whose gradient was computed, and, where the update of the row was not taken, why: lost.
    """

    row: TrainRow
    live: NDArray[np.bool_]
    counted: bool
    staleness: NDArray[np.int64]
    advantages: float | NDArray[np.float64] = 0.0
    returns: float | NDArray[np.float64] = 0.0
    weight: float = 0.0
    proximal: NDArray[np.float32] | None = None
    rejected: int = 0
    in_loss: int = 0
    lost: str = ""

    @property
    def live_tokens(self) -> int:
        return int(self.live.sum())

    @property
    def trained(self) -> int:
        """Returns the tokens that entered the loss of an update that was taken; 0 before that update."""
        return 0 if self.lost else self.in_loss

    def report(self) -> TrainedSample:
        """Returns what the step did with the response tokens, after its last update."""
        tokens = len(self.live)
        live = self.live_tokens
        reason = "truncated" if not self.counted else "stale" if live < tokens else ""
        account = TrainedSample(*self.row.key, self.trained, tokens - live, reason, self.rejected)
        if live and (self.lost or not self.in_loss + self.rejected):
            account = TrainedSample(*self.row.key, 0, tokens, self.lost or LEFT_OUT)
        if not self.row.is_shown:
            return account
        return replace(account, advantages=_shown(self.advantages), rewards=_shown(self.row.rewards))


def _shown(numbers: float | NDArray[np.float64] | None) -> tuple[float, ...]:
    """Returns the number of each token; () where all have the same."""
    if not isinstance(numbers, np.ndarray):
        return ()
    return tuple(round(number, SHOWN_DIGITS) for number in numbers.tolist())


def mask_rows(
    rows: Sequence[TrainRow], incarnation: int, version: int, limit: int, policy: Policy, mask_truncated: bool
) -> list[MaskedRow]:
    """Masks every token of another incarnation or of a version older than `version - limit`; `admit` has no limit. With
    `mask_truncated` a truncated row leaves the loss and its denominators; a stale token only loses its loss term."""
    masked = []
    for row in rows:
        fresh = POLICIES[policy].live(row.versions, version, limit)
        counted = not (mask_truncated and row.truncated)
        is_live = fresh & (row.incarnation == incarnation) & counted
        masked.append(MaskedRow(row, is_live, counted, version - row.versions, row.advantage))
    return masked


def mask_counts(rows: Sequence[MaskedRow]) -> Tensor:
    """Counts response tokens, float64 [4]: all, live, masked as stale, left out as truncated."""
    counts = torch.zeros(4, dtype=torch.float64)
    for row in rows:
        tokens = len(row.live)
        live = row.live_tokens
        stale, truncated = (tokens - live, 0) if row.counted else (0, tokens)
        counts += torch.tensor([tokens, live, stale, truncated], dtype=torch.float64)
    return counts


def mask_metrics(counts: Tensor) -> dict[str, float]:
    """Returns the metrics of `mask_counts` summed over all ranks, for a step that has trained nothing so far."""
    tokens, _, stale, truncated = counts.tolist()
    return {
        "tokens/response": tokens,
        "tokens/trained": 0.0,
        "staleness/masked_fraction": stale / max(1, tokens),
        "mask/stale_fraction": stale / max(1, tokens),
        "mask/truncated_fraction": truncated / max(1, tokens),
    }


PerToken: TypeAlias = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int64] | float

SHORTEST = 0.8
"""A row below this share of the longest row of a micro-batch starts the next one: padding adds at most a quarter."""
FILLED = 1 / 8
"""A micro-batch below this share of the token budget accepts shorter rows too, because small passes are inefficient."""


def micro_batches(
    lengths: Sequence[int], budget: float, contexts: Sequence[int] = (), *, packed: bool = False
) -> list[list[int]]:
    """Groups row indices into micro-batches of rows of similar length, the longest first: a lack of memory shows
    at once. rows x longest row <= budget, which counts padding, or the sum of all rows if they are packed. A row over
    the budget is a micro-batch of its own; `lay_out_rows` splits its contexts. contexts: rows of the model that each
    row takes, by default one, of `lengths` tokens at most."""
    if packed:
        return _filled(lengths, budget, contexts)
    parts: list[list[int]] = []
    numbers = contexts or [1] * len(lengths)
    rows = longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        similar = lengths[row] >= SHORTEST * longest or rows * longest < FILLED * budget
        if rows and similar and (rows + numbers[row]) * longest <= budget:
            parts[-1].append(row)
            rows += numbers[row]
        else:
            parts.append([row])
            rows = numbers[row]
            longest = lengths[row]
    return parts


def _filled(lengths: Sequence[int], budget: float, contexts: Sequence[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    room = 0.0
    numbers = contexts or [1] * len(lengths)
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tokens = lengths[row] * numbers[row]
        if not parts or tokens > room:
            parts.append([])
            room = budget
        parts[-1].append(row)
        room -= tokens
    return parts


def forward_passes(batch: Batch, config: Config) -> list[list[int]]:
    """Groups row indices into the forward passes of a model that does not train. With `generation.deterministic` each
    row has a pass of its own, so that its bits do not depend on other rows."""
    if config.generation.deterministic:
        return [[row] for row in range(len(batch))]
    longest, contexts = padded_sizes(model_rows(batch))
    return micro_batches(longest, config.training.micro_batch_tokens, contexts)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Holds the input of one forward pass, and where the model predicts sampled tokens.

    ids: [rows, length], right-padded, without the last token of each row, which predicts nothing; [1, tokens] of packed
    rows. positions: [tokens], indices into the flattened [rows * length] states that predict sampled tokens.
    position_ids [1, tokens], attention: only of packed rows. experts: [rows * length, numbers of a token], only
    where they are replayed. pictures: of the prompts, if any has one.
    """

    ids: Tensor
    positions: Tensor
    position_ids: Tensor | None
    attention: PackedAttention | None
    experts: Tensor | None = None
    pictures: PictureInput | None = None


@dataclass(frozen=True, slots=True)
class ModelRows:
    """Holds the model input of some rows, and their sampled tokens.

    passes: one, or several where the contexts of a row are over the budget together. targets: the sampled ids [tokens].
    order: where the state that predicts each target is in the concatenated states of several passes, else None.
    """

    passes: tuple[ModelInput, ...]
    targets: Tensor
    temperatures: Tensor
    order: Tensor | None


def lay_out_rows(
    rows: Sequence[ModelRow],
    device: torch.device,
    packs: bool = False,
    budget: float = math.inf,
    *,
    replayed: bool = True,
) -> ModelRows:
    """Lays out rows of prompt and response for the prediction of the sampled tokens. packs: whether the model computes
    packed rows, in which samples share prompts; what saves little is padded. The policy sees given tokens as it sees
    the prompt, and of several contexts each is a row of the model. budget: tokens of one pass; contexts over it take
    several, and a longer one a pass of its own. replayed: with the experts that rows have recorded, all or none."""
    contexts = [each for row in rows for each in contexts_of(row)]
    columns: Any = zip(*contexts, strict=True)
    prompts, responses, sampled, of_contexts, experts, pictures = columns
    targets = [response[own] for response, own in zip(responses, sampled, strict=True)]
    temperatures = np.repeat(np.array(of_contexts, np.float32), [*map(len, targets)])
    sizes = [*map(add, map(len, prompts), map(len, responses))]
    replayed = replayed and experts[0] is not None
    packs = packs and not replayed and not any(pictures)
    order: Tensor | None = None
    if (sum(sizes) if packs else len(sizes) * max(sizes)) <= budget:
        passes: tuple[ModelInput, ...] = (_model_input(contexts, device, budget, packs=packs, replayed=replayed),)
    else:
        parts = micro_batches(sizes, budget, packed=packs)
        chosen = [[contexts[index] for index in part] for part in parts]
        passes = tuple(_model_input(part, device, budget, packs=packs, replayed=replayed) for part in chosen)
        places = np.split(np.arange(len(temperatures)), np.cumsum([*map(len, targets)])[:-1])
        order = torch.from_numpy(np.argsort(np.concatenate([places[index] for part in parts for index in part])))
    return ModelRows(
        passes,
        torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        torch.from_numpy(temperatures).to(device),
        None if order is None else order.to(device),
    )


def _model_input(
    contexts: Sequence[Context], device: torch.device, budget: float, *, packs: bool, replayed: bool
) -> ModelInput:
    columns: Any = zip(*contexts, strict=True)
    prompts, responses, sampled, _, _, pictures = columns
    packed = pack_rows(prompts, responses, budget, shared_from(device.type)) if packs else None
    ids, states = _padded_rows(prompts, responses) if packed is None else (packed.ids[None], packed.states)
    positions = [state[own] for state, own in zip(states, sampled, strict=True)]
    return ModelInput(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        None if packed is None else torch.from_numpy(packed.position_ids[None]).to(device),
        None if packed is None else PackedAttention(packed.segments, device),
        _padded_experts(contexts, ids.shape[1], device) if replayed else None,
        PictureInput.of(pictures, ids.shape[1], device),
    )


def _padded_experts(contexts: Sequence[Context], length: int, device: torch.device) -> Tensor:
    """Returns the experts of padded rows, as in ModelInput; nothing is recorded of padding."""
    recorded = [each.experts for each in contexts if each.experts is not None]
    assert len(recorded) == len(contexts), "experts are replayed in all rows or in none"
    like = recorded[0]
    found = np.full((len(contexts), length, like.shape[1]), np.iinfo(like.dtype).max, like.dtype)
    for row, experts in enumerate(recorded):
        tokens = min(length, len(experts) - 1)
        found[row, :tokens] = experts[:tokens]
    return torch.from_numpy(found).to(device).flatten(0, 1)


def _padded_rows(prompts: Sequence[Ids], responses: Sequence[Ids]) -> tuple[Ids, list[Ids]]:
    """Returns ids [rows, length] and the states that predict each response, as in ModelRows."""
    length = max(map(add, map(len, prompts), map(len, responses))) - 1
    ids = np.zeros((len(prompts), length), np.int64)
    states = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens = np.concatenate([prompt, response[:-1]])
        ids[row, : len(tokens)] = tokens
        first = row * length + len(prompt) - 1
        states.append(np.arange(first, first + len(response)))
    return ids, states


def split_by_row(tokens: Tensor, rows: Sequence[ModelRow]) -> list[NDArray[np.float32]]:
    """Splits flat values of sampled tokens into one numpy array per row."""
    lengths = [len(row.response_ids) if row.spans is None else int(row.spans[::2].sum()) for row in rows]
    return np.split(tokens.detach().cpu().numpy(), np.cumsum(lengths)[:-1])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Holds the tensors of one loss. All but those of `model_rows.passes` are flat [live tokens], row after row.

    ragged: the row of each live token. weights: weight of each token in the loss. behaviour: log-probs that the engine
    recorded. fresh: 1 where the token and all earlier tokens of its sample were sampled by the weights that now train,
    else 0. reference: log-probs of the reference model, None without a KL term. proximal: the trainer's log-probs at
    the start of the step, None where the current ones equal them.
    """

    model_rows: ModelRows
    ragged: Ragged
    weights: Tensor
    behaviour: Tensor
    advantages: Tensor
    staleness: Tensor
    fresh: Tensor
    reference: Tensor | None
    proximal: Tensor | None


def micro_batch(
    rows: Sequence[MaskedRow], device: torch.device, packs: bool = False, budget: float = math.inf
) -> MicroBatch:
    """Builds the tensors of the loss of these rows. packs, budget: see `lay_out_rows`."""
    fresh = [(np.maximum.accumulate(row.staleness) == 0).astype(np.float32) for row in rows]
    reference = [row.row.reference_logprobs for row in rows if row.row.reference_logprobs is not None]
    proximal = [row.proximal for row in rows if row.proximal is not None]
    return MicroBatch(
        model_rows=live_rows(rows, device, packs, budget),
        ragged=Ragged.of([row.live_tokens for row in rows], device),
        weights=live_values(rows, [row.weight for row in rows], device),
        behaviour=live_values(rows, [row.row.logprobs for row in rows], device),
        advantages=live_values(rows, [row.advantages for row in rows], device),
        staleness=live_values(rows, [row.staleness for row in rows], device),
        fresh=live_values(rows, fresh, device),
        reference=live_values(rows, reference, device) if reference else None,
        proximal=live_values(rows, proximal, device) if proximal else None,
    )


def live_values(rows: Sequence[MaskedRow], columns: Sequence[PerToken], device: torch.device) -> Tensor:
    """Returns one value per live token, float32 [live tokens], from one column per row or one number per row."""
    live = [np.broadcast_to(column, row.live.shape)[row.live] for row, column in zip(rows, columns, strict=True)]
    return torch.from_numpy(np.concatenate(live).astype(np.float32)).to(device)


def live_rows(
    masked: Sequence[MaskedRow], device: torch.device, packs: bool = False, budget: float = math.inf
) -> ModelRows:
    """Lays out whole rows for the model, with predictions for live tokens only."""
    whole = lay_out_rows([item.row for item in masked], device, packs, budget)
    live = torch.from_numpy(np.concatenate([item.live for item in masked])).to(device)
    passes = whole.passes
    order = whole.order
    if order is None:
        passes = (replace(passes[0], positions=passes[0].positions[live]),)
    else:
        order = order[live]
    return ModelRows(passes, whole.targets[live], whole.temperatures[live], order)
