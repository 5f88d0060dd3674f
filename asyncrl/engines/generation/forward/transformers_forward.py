"""One forward of a transformers model over a flat row of tokens, with our own KV cache.

The model's own modules compute it, or the written-out forward of `llama_forward.py` where that knows the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.generation.forward.attention import NAME, DecodeBlocks, FlatTokens, PrefillPadding
from asyncrl.engines.generation.forward.kv_cache import Ints, KVCache
from asyncrl.engines.generation.forward.llama_forward import Linear, LlamaForward

NOTHING: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """Holds a sequence without cached keys. row: the slot that stores them."""

    row: int
    tokens: Ints


class FlatModel:
    """Wraps a causal LM so that it attends with `flat_attention`. The wrapper owns the model and changes its config.

    direct: the written-out forward, or None where the model's modules compute.

    Args:
        model: a transformers causal LM in evaluation mode.
        vocabulary: number of token ids; padding rows of the head from here on get the logit -inf.
        fixed: attend to all blocks of a slot, so that no sequence's length changes the shapes of another.
        float32_head: compute logits in float32, whatever the dtype of the model.
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
        self.model = model
        self.slots = slots
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._vocabulary = vocabulary
        self.cache = KVCache(slots, limit, fixed=fixed)
        model.set_attn_implementation(NAME)
        self.direct = LlamaForward.of(model)
        self._float32_head = float32_head
        self.weights_changed()

    def weights_changed(self) -> None:
        """Must be called after the values or the tensors of the model's parameters changed."""
        self._head = Linear.of(self.model.get_output_embeddings()).float32() if self._float32_head else None

    @torch.no_grad()
    def logits(self, tokens: Ints, positions: Ints, prefill: Sequence[PrefillSequence] = ()) -> Tensor:
        """Returns the logits [rows, vocabulary] of the next token of each sequence, in float32 or the model's dtype.

        tokens, positions: [decoding], one new token of each of the first slots. prefill: further sequences from their
        first token on. Rows have this order.
        """
        lengths = [len(sequence.tokens) for sequence in prefill]
        self.cache.allocate_next(positions)
        for sequence in prefill:
            self.cache.allocate(sequence.row, len(sequence.tokens))
        flat = self._flat_tokens(positions, prefill, lengths)
        ids = np.concatenate([tokens, *(sequence.tokens for sequence in prefill)])
        last = np.concatenate([np.arange(len(tokens)), len(tokens) + np.cumsum(lengths, dtype=np.int64) - 1])
        logits = self._logits(self.tensor(ids), flat, self.tensor(last))
        logits[:, self._vocabulary :] = -torch.inf
        return logits

    def logits_after(self, tokens: Ints) -> Tensor:
        """Returns the logits [vocabulary] of the token after these, with a KV cache of its own."""
        own = self.cache
        self.cache = KVCache(1, len(tokens))
        try:
            return self.logits(NOTHING, NOTHING, [PrefillSequence(0, tokens)])[0]
        finally:
            self.cache = own

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
        """Copies an array to the device of the model."""
        return torch.from_numpy(values).to(self.device)

    def _flat_tokens(self, positions: Ints, prefill: Sequence[PrefillSequence], lengths: list[int]) -> FlatTokens:
        decoding = len(positions)
        # DecodeBlocks.of may move blocks, so it comes before `locations`.
        blocks = DecodeBlocks.of(self.cache, positions, self.device) if decoding else None
        rows = np.concatenate([np.arange(decoding), np.repeat([sequence.row for sequence in prefill], lengths)])
        steps = np.concatenate([positions, *(np.arange(length) for length in lengths)])
        at, offsets = self.cache.locations(rows.astype(np.int64), steps)
        return FlatTokens(
            self.cache,
            locations=(self.tensor(at), self.tensor(offsets)),
            positions=self.tensor(steps),
            decoding=decoding,
            blocks=blocks,
            prefill=PrefillPadding.of(lengths, decoding, self.device) if lengths else None,
        )
