"""Loads a causal LM for sampling and computes its logits over a flat row of tokens, with our own KV cache.

The model's own modules compute, or `llama_fast_path.py` where that knows the model. Models whose attention the engine
does not compute are refused: by their config where it tells, and by a comparison of logits where nothing does.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.experts.record_shape import RecordShape
from asyncrl.engines.experts.router_replay import ChosenExperts
from asyncrl.engines.generation.forward.attention import NAME, CachedBeginnings, DecodeBlocks, FlatTokens
from asyncrl.engines.generation.forward.kv_cache import KVCache
from asyncrl.engines.generation.forward.layer_slices import ALONE, LayerStage, join_of, keep_layers, keep_slices
from asyncrl.engines.generation.forward.llama_fast_path import bind_parameters, is_llama_like, llama_states
from asyncrl.engines.generation.scheduling.block_pool import KV_BLOCK, Ints
from asyncrl.engines.model_loading import load_pretrained
from asyncrl.engines.models.model_families import DIFFERS, attention_not_computed, not_computed
from asyncrl.engines.output_scaling import OutputScaling
from asyncrl.engines.pictures.model_input import FlatPictures
from asyncrl.engines.pictures.prompt_pictures import PromptPictures
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.errors import ConfigError

NOTHING: Ints = np.zeros(0, np.int64)
NO_PREFILL: Mapping[int, Ints] = {}
NONE_HELD: Mapping[int, int] = {}
NO_PICTURES: Mapping[int, PromptPictures] = {}
PADDING = 2  # times that a sequence in prefill may be longer than another with which it is padded
PROBE_DECODED = 4  # tokens of the probe that are decoded one by one, after the others in prefill
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest difference to transformers, in nats: far above rounding and far below the effect of a wrong mask. It bounds
the maximum over log-probs in float32 and their mean in bfloat16, which rounds single unlikely tokens by more."""


class FlatModel:
    """Wraps a causal LM so that it attends with `flat_attention`. The wrapper owns the model and changes its config.

    fast: whether the fast path computes instead of the model's modules.

    Args:
        model: a transformers causal LM in evaluation mode.
        vocabulary: number of token ids; padding rows of the head from here on get the logit -inf.
        fixed: attend to all blocks of a slot, so that no sequence's length changes the shapes of another.
        float32_head: compute logits in float32, whatever the dtype of the model.
        blocks: of the KV cache; None has room for `limit` positions in every slot.
        record: of the experts that the routers choose, kept in the cache; None keeps none. Raises ConfigError as
            `routers_of`.
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
        blocks: int | None = None,
        record: RecordShape | None = None,
    ) -> None:
        self.model = model
        self.device: torch.device = model.device  # The property of transformers asks all parameters.
        self.slots = slots
        self.cache = KVCache(slots, limit, blocks=blocks, fixed=fixed, record=record)
        self._chosen = None if record is None else ChosenExperts(model, record)
        self.fast = is_llama_like(model)
        self._ranks = ALONE.tensor
        self._stage = LayerStage(range(len(model.model.layers) if self.fast else 0), ALONE.stages)
        self._vocabulary = vocabulary
        self._float32_head = float32_head
        self._scaling = OutputScaling.of(model.config)
        self._pictures = FlatPictures(model)
        has_encoder = model.config.get_text_config() is not model.config  # It attends to both sides, as it is.
        model.set_attn_implementation({"text_config": NAME} if has_encoder else NAME)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Must be called after the values or the tensors of the model's parameters changed."""
        head = self.model.get_output_embeddings()
        self._head = deepcopy(head).float() if self._float32_head else head
        join = join_of(self._ranks, fixed=self.cache.tables.fixed)
        self._body = bind_parameters(self.model.model, self.cache.limit, self._stage, join) if self.fast else None
        self._pictures.clear()

    def share_out(self, ranks: RankMesh, device: torch.device, trained: int = 1) -> None:
        """Keeps the layers of this rank's stage, and its slices of them, on a device, where it computes from now on
        together with the others. The fast path must know the model. trained: stages of the trainer."""
        self._ranks = ranks.tensor
        self._stage = LayerStage.of(self.model.config.num_hidden_layers, trained, ranks.stages)
        keep_slices(self.model, ranks.tensor)
        keep_layers(self.model, self._stage)
        self.model.to(device)
        self.device = device
        self.weights_changed()

    def put_away(self) -> None:
        """Frees keys and values, and what was made from parameters, until `weights_changed` is called."""
        self.cache.free_memory()
        self._pictures.clear()
        self._head = self._body = None

    @torch.no_grad()
    def logits(
        self,
        tokens: Ints,
        positions: Ints,
        prefill: Mapping[int, Ints] = NO_PREFILL,
        held: Mapping[int, int] = NONE_HELD,
        slots: Ints | None = None,
        pictures: Mapping[int, PromptPictures] = NO_PICTURES,
    ) -> Tensor:
        """Returns the logits [rows, vocabulary] of the next token of each sequence, in float32 or the model's dtype.

        tokens, positions: [decoding], one new token of each of `slots`, None for the first slots. prefill: tokens of
        sequences without cached keys, by slot. held: positions of a slot that the cache has already; its sequence in
        `prefill` begins after them, and stands behind those without. Rows have this order. Slots get the blocks that
        they lack. pictures: of the prompts of these slots.
        """
        decoding = np.arange(len(positions)) if slots is None else slots
        lengths = [len(sequence) for sequence in prefill.values()]
        begin = [held.get(slot, 0) for slot in prefill]
        self._allocate(np.array([*decoding, *prefill]), np.array([*(positions + 1), *np.add(begin, lengths)]))
        # DecodeBlocks.of may move blocks, so it comes before `locations`.
        blocks = DecodeBlocks.of(self.cache, decoding, positions, self.device) if len(positions) else None
        rows = np.concatenate([decoding, np.repeat(list(prefill), lengths)]).astype(np.int64)
        steps = np.concatenate(
            [positions, *(np.arange(first, first + length) for first, length in zip(begin, lengths, strict=True))]
        )
        at, offsets = (self.tensor(each) for each in self.cache.locations(rows, steps))
        fresh = len(begin) - np.count_nonzero(begin)
        beginnings = self._beginnings(list(prefill)[fresh:], begin[fresh:], lengths[fresh:])
        flat = FlatTokens(self.cache, (at, offsets), self.tensor(steps), blocks, lengths[:fresh], beginnings)
        ids = self.tensor(np.concatenate([tokens, *prefill.values()]))
        last = np.concatenate([np.arange(len(tokens)), len(tokens) + np.cumsum(lengths, dtype=np.int64) - 1])
        layout = self._pictures.layout(ids, rows, steps, pictures) if pictures else _layout(ids, flat)
        logits = self._logits(layout, flat, self.tensor(last))
        if self._chosen is not None:
            self.cache.remember((at, offsets), self._chosen.taken())
        logits[:, self._vocabulary :] = -torch.inf
        return logits

    def _allocate(self, slots: Ints, lengths: Ints) -> None:
        for index in np.flatnonzero(self.cache.tables.counts[slots] * KV_BLOCK < lengths):
            self.cache.tables.allocate(int(slots[index]), int(lengths[index]))

    def _beginnings(self, slots: list[int], held: list[int], lengths: list[int]) -> tuple[CachedBeginnings, ...]:
        """Describes sequences that go on, in parts within which no sequence is more than PADDING times another."""
        assert all(held), "sequences without cached keys come first"
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        parts = list[CachedBeginnings]()
        part = slice(0, 0)
        for index, length in enumerate(map(sum, zip(held, lengths, strict=True))):
            first = held[part.start] + lengths[part.start]
            if max(first, length) > PADDING * min(first, length):
                parts.append(self._part(slots[part], held[part], lengths[part], like))
                part = slice(index, index)
            part = slice(part.start, index + 1)
        return (*parts, self._part(slots[part], held[part], lengths[part], like)) if slots else ()

    def _part(self, slots: list[int], held: list[int], lengths: list[int], like: Tensor) -> CachedBeginnings:
        return CachedBeginnings.of(self.cache, dict(zip(slots, held, strict=True)), lengths, like)

    def logits_after(self, tokens: Ints) -> Tensor:
        """Returns the logits [vocabulary] of the token after these, with a KV cache of its own."""
        with self._other_cache(KVCache(1, len(tokens))):
            return self.logits(NOTHING, NOTHING, {0: tokens})[0]

    def verify_whole(self, ids: Ints, expected: Tensor) -> None:
        """Verifies the whole model, as `verify` does, before layers are shared out, with a cache for the probe alone:
        that of this rank has room for its own heads."""
        with self._other_cache(KVCache(1, len(ids), fixed=self.cache.tables.fixed)):
            self.verify(ids, expected)

    def verify(self, ids: Ints, expected: Tensor) -> None:
        """Compares this forward, in prefill and decode, with `expected` from `probe_logprobs`.

        A fast path that differs is replaced by the modules. Raises ConfigError when they differ by more than rounding,
        or are no numbers.
        """
        if not torch.isfinite(expected).any():
            raise ConfigError("model.name: the model computes NaN: its weights hold NaN or infinity; take other files")
        tolerance = PROBE_TOLERANCE[self.model.dtype]
        if self.fast and not self._largest_difference(ids, expected) <= tolerance:
            self.fast = False
        if not self.fast and not (found := self._largest_difference(ids, expected)) <= tolerance:
            raise ConfigError(f"model.name: {not_computed(self.model.config.model_type, DIFFERS.format(found))}")

    @contextmanager
    def _other_cache(self, cache: KVCache) -> Iterator[None]:
        own = self.cache
        self.cache = cache
        try:
            yield
        finally:
            self.cache = own

    def tensor(self, values: NDArray[Any]) -> Tensor:
        """Copies an array to the device of the model."""
        return torch.from_numpy(values).to(self.device)

    def _logits(self, layout: Mapping[str, Tensor], flat: FlatTokens, last: Tensor) -> Tensor:
        if self.fast or self._float32_head:
            states = self._states(layout, flat, last)
            head = self._head
            if self._stage.is_last:
                logits = self._scaling.apply(head(states.to(head.weight.dtype)))
            else:
                logits = head.weight.new_empty((len(last), head.out_features))
            logits = self._stage.from_last(logits)
        else:
            logits = self.model(**layout, logits_to_keep=last, use_cache=False, flat=flat).logits[0]
        return logits

    def _states(self, layout: Mapping[str, Tensor], flat: FlatTokens, last: Tensor) -> Tensor:
        if self.fast:
            return llama_states(self._body, layout["input_ids"][0], flat, last)
        states: Tensor = self.model.base_model(**layout, use_cache=False, flat=flat).last_hidden_state
        return states[0, last]

    def _largest_difference(self, ids: Ints, expected: Tensor) -> float:
        """Returns the difference of log-probs as PROBE_TOLERANCE counts it, without offsets common to all tokens."""
        prefill = len(ids) - PROBE_DECODED
        found = [self.logits(NOTHING, NOTHING, {0: ids[:prefill]})]
        for position in range(prefill, len(ids)):
            found.append(self.logits(ids[position : position + 1], np.array([position])))
        self.cache.tables.free(0)
        real = torch.isfinite(found[0][0])
        difference = (torch.cat(found).float()[:, real] - expected[:, real]).float()
        spread = (difference - difference.mean(-1, keepdim=True)).abs()
        return float(spread.max() if self.model.dtype == torch.float32 else spread.mean())


def _layout(ids: Tensor, flat: FlatTokens) -> dict[str, Tensor]:
    """Returns what the model gets of tokens: ids and positions, [1, tokens]."""
    return {"input_ids": ids[None], "position_ids": flat.positions[None]}


def load_model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Loads a model for sampling. Raises ConfigError when the engine does not compute its attention."""
    model = load_pretrained(folder, dtype=dtype)
    if reason := attention_not_computed(model.config.to_dict()):
        raise ConfigError(f"model.name: {not_computed(model.config.model_type, reason)}")
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def probe_logprobs(model: Any, ids: Ints) -> Tensor:
    """Returns log-probs of the model's own forward over the probe `ids`; must run before its attention is replaced."""
    tokens = torch.from_numpy(ids).to(model.device)
    compared = PROBE_DECODED + 1  # A long probe has no logits of all its tokens at once.
    logits: Tensor = model(input_ids=tokens[None], use_cache=False, logits_to_keep=compared).logits[0]
    return logits.float().log_softmax(-1)
