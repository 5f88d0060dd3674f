"""One forward of a transformers model over a flat row of tokens, with keys and values of our own: by its unchanged
modules, or written out where the model is one of those that direct.py knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.generation.attention import NAME, Chunks, FlatTokens, Padding
from asyncrl.engines.generation.cache import Ints, KVCache
from asyncrl.engines.generation.direct import DirectForward, Product

NOTHING: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Whole:
    """A sequence none of whose keys are cached. row: the slot that takes them."""

    row: int
    tokens: Ints


class FlatModel:
    """A causal LM whose attention is `flat_attention`. The model must be nobody else's: its config is changed.
    direct: its forward written out; None: its modules compute.

    Args:
        model: a transformers causal LM in evaluation mode.
        vocabulary: ids from here on stand for no token (padding rows of the head) and get -inf.
        fixed: attend to all of a slot's chunks, so that no sequence's length changes another's shapes.
        float32_head: logits are computed in float32, whatever the model's dtype.
    """

    def __init__(
        self,
        model: Any,
        slots: int,
        limit: int,
        vocabulary: int,
        *,
        fixed: bool = False,
        float32_head: bool = False,
    ) -> None:
        self.model, self.slots = model, slots
        self.device: torch.device = model.device  # asking the model walks through its parameters
        self.dtype: torch.dtype = model.dtype
        self._vocabulary = vocabulary
        self.cache = KVCache(slots, limit, fixed=fixed)
        model.set_attn_implementation(NAME)
        self.direct = DirectForward.of(model)
        self._float32_head = float32_head
        self.weights_changed()

    def weights_changed(self) -> None:
        """After new values, or new tensors, for the model's parameters."""
        self._head = Product.of(self.model.get_output_embeddings()).float32() if self._float32_head else None

    @torch.no_grad()
    def logits(self, tokens: Ints, positions: Ints, whole: Sequence[Whole] = ()) -> Tensor:
        """Logits [rows, vocabulary] of the token that follows each of the given: float32 or the model's dtype.

        tokens, positions: [decoding], one new token of each of the first slots. whole: sequences from their start.
        """
        lengths = [len(sequence.tokens) for sequence in whole]
        self._hold(positions, whole)
        flat = self._flat(positions, whole, lengths)
        ids = np.concatenate([tokens, *(sequence.tokens for sequence in whole)])
        last = np.concatenate([np.arange(len(tokens)), len(tokens) + np.cumsum(lengths, dtype=np.int64) - 1])
        logits = self._logits(self.tensor(ids), flat, self.tensor(last))
        logits[:, self._vocabulary :] = -torch.inf
        return logits

    def logits_after(self, tokens: Ints) -> Tensor:
        """Logits [vocabulary] of the token that follows these, with keys and values that nobody keeps."""
        kept, self.cache = self.cache, KVCache(1, len(tokens))
        try:
            return self.logits(NOTHING, NOTHING, [Whole(0, tokens)])[0]
        finally:
            self.cache = kept

    def _logits(self, ids: Tensor, flat: FlatTokens, last: Tensor) -> Tensor:
        if self._head is not None:
            return self._head(self._states(ids, flat, last).float())
        if self.direct is not None:
            return self.direct.logits(ids, flat, last)
        logits: Tensor = self.model(
            input_ids=ids[None], position_ids=flat.positions[None], logits_to_keep=last, use_cache=False, flat=flat
        ).logits[0]
        return logits

    def _states(self, ids: Tensor, flat: FlatTokens, last: Tensor) -> Tensor:
        if self.direct is not None:
            return self.direct.states(ids, flat, last)
        states: Tensor = self.model.base_model(
            input_ids=ids[None], position_ids=flat.positions[None], use_cache=False, flat=flat
        ).last_hidden_state
        return states[0, last]

    def tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _hold(self, positions: Ints, whole: Sequence[Whole]) -> None:
        self.cache.hold_next(positions)
        for sequence in whole:
            self.cache.hold(sequence.row, len(sequence.tokens))

    def _flat(self, positions: Ints, whole: Sequence[Whole], lengths: list[int]) -> FlatTokens:
        decoding = len(positions)
        chunks = Chunks.of(self.cache, positions, self.device) if decoding else None  # may move chunks: before `places`
        rows = np.concatenate([np.arange(decoding), np.repeat([sequence.row for sequence in whole], lengths)])
        steps = np.concatenate([positions, *(np.arange(length) for length in lengths)])
        at, offsets = self.cache.places(rows.astype(np.int64), steps)
        return FlatTokens(
            self.cache,
            places=(self.tensor(at), self.tensor(offsets)),
            positions=self.tensor(steps),
            decoding=decoding,
            chunks=chunks,
            whole=Padding.of(lengths, decoding, self.device) if lengths else None,
        )
