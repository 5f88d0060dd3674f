"""The `torch` engine: continuous batching over slots, with one flat forward per step.

    submit ── waiting ── slot ── prefill, in chunks ── decode, one token a step ── completion
                          ▲          ▲     blocks lack: the youngest      │
                          │          └──────────── is preempted ──────────┤
                          └── next turn, with the blocks that were parked ┘

A step samples one token of every decoding sample, and computes chunks of the prompts of others within a budget, all in
one forward. A prompt is computed once for all samples that begin with it, whichever step they start in. After new
weights under `kv = "recompute"`, all samples are in prefill again.

The deterministic mode fixes every shape that a sample can see: all slots decode, attention covers the whole slot, and
each prompt has a forward of its own. Other rows and masked positions then do not change the bits of a sample.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import probe_tokens
from asyncrl.engines.generation.block_pool import Ints, cache_blocks, engine_slots
from asyncrl.engines.generation.engine_interface import (
    NO_WEIGHTS,
    Completion,
    Finish,
    Key,
    SampleRequest,
    refuse_too_long,
)
from asyncrl.engines.generation.flat_model import (
    ALONE,
    NOTHING,
    FlatModel,
    is_llama_like,
    load_model,
    of_stage,
    probe_logprobs,
    refuse_slices,
)
from asyncrl.engines.generation.running_batch import BlockMemory, RunningBatch
from asyncrl.engines.generation.tokenization import TokenizerWithStops, TurnRenderer, end_ids
from asyncrl.engines.models.lora import attach, fill_for_probe, published_spec
from asyncrl.engines.models.model_families import BY_NEIGHBOURS, RecordShape, refuse_rotation_by_longest_row
from asyncrl.engines.models.model_folder import context_of, longest_row
from asyncrl.engines.models.model_loading import vocabulary_size
from asyncrl.engines.models.model_shape import layers_of_stage
from asyncrl.engines.models.prompt_pictures import PictureProcessor, PromptPictures
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.errors import ConfigError, PeerLost, WeightsError
from asyncrl.lanes.weights.slot_memory import DTYPES, Role, WeightsSpec, roles_of
from asyncrl.protocols.batch import SampleName
from asyncrl.tasks.stored_samples import read_stored_samples

# Plans what a step computes of sequences in prefill: chunks within a budget, so that no step is long.
#
# A token attends to all tokens before it, so a late token of a long prompt costs more than an early one. The budget
# is counted in first tokens of a prompt.


FEWEST_TOKENS = 8  # of a chunk that does not end its sequence; smaller ones cost as much
IDLE_BUDGETS = 16  # budgets of a step without decoding sequences, in which nothing waits


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence in prefill. held: first tokens whose keys and values the cache has. length: tokens of the sequence."""

    row: int
    held: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `first` up to, without, `end` of the sequence of a row. last: whether the sequence ends with them."""

    row: int
    first: int
    end: int
    last: bool


def step_budget(tokens: int, decoding: int, waiting: int) -> float:
    """Returns the budget of a step in which so many rows decode, and so many wait in prefill.

    It is `tokens` beside a full batch, and rises with the share of rows that wait: one long prompt does
    not slow down the others, and turns that begin together do not queue behind a few that decode.
    """
    share = waiting / max(1, decoding + waiting)
    return tokens * (1 + (IDLE_BUDGETS - 1) * share)


def plan_chunks(prefills: Iterable[Prefill], budget: float, position_cost: float) -> list[Chunk]:
    """Returns the chunks of one step, in the order of `prefills`; the first is never empty.

    budget: cost of all chunks together, where a token at position p costs 1 + p * position_cost.
    """
    chunks: list[Chunk] = []
    for each in prefills:
        left = each.length - each.held
        fitting = _tokens_within(budget, each.held, position_cost)
        if not chunks:
            fitting = max(fitting, FEWEST_TOKENS)
        count = min(left, fitting)
        if count < min(left, FEWEST_TOKENS):
            break
        chunks.append(Chunk(each.row, each.held, each.held + count, last=count == left))
        budget -= count * (1 + position_cost * (each.held + count / 2))
    return chunks


def _tokens_within(budget: float, held: int, position_cost: float) -> int:
    """Returns the largest n with n (1 + held c) + n^2 c / 2 <= budget, where c is the cost of a position."""
    if budget <= 0:
        return 0
    linear = 1 + held * position_cost
    return int(2 * budget / (linear + math.sqrt(linear**2 + 2 * position_cost * budget)))


# Truncates the distribution that tokens are sampled from: min-p, then top-k, then top-p, as vLLM does.


NEVER = -torch.inf
"""Logit of a token that cannot be sampled."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Bounds of the tokens that may be sampled. top_p: smallest mass of the likeliest tokens (nucleus sampling, arXiv
    1904.09751); 1: all. top_k: number of the likeliest tokens; 0: all. min_p: least probability, as a share of the
    largest one (arXiv 2407.01082); 0: all."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __bool__(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns logits [rows, vocabulary] with -inf for what is cut off; at least the likeliest token stays. Each
        bound counts in what the one before left. Of equal tokens at a bound, top-k and min-p keep all, and top-p those
        with smaller ids."""
        if self.min_p:
            probabilities = logits.softmax(-1)
            logits = logits.masked_fill(probabilities < self.min_p * probabilities.amax(-1, keepdim=True), NEVER)
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, NEVER)
        return self._nucleus(logits) if self.top_p < 1 else logits

    def _nucleus(self, logits: Tensor) -> Tensor:
        """Cuts off each token before which likelier ones have the mass `top_p` already. float64 sums of float32
        probabilities, as in sampling."""
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1).double()
        before = probabilities.cumsum(-1) - probabilities
        ordered = ordered.masked_fill(before >= self.top_p, NEVER)
        return torch.empty_like(logits).scatter_(-1, order, ordered)


# Samples tokens, with their log-probs, from logits and one uniform number per row.


BLOCK = 128  # tokens per block; a cumulative sum over a large vocabulary would take twice the time of the rest
WHOLE = Truncation()  # leaves every token
BELOW = 1 - 2.0**-50  # keeps a number that was rounded up to the sum of a block inside the block


def sample(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, truncation: Truncation = WHOLE
) -> tuple[Tensor, Tensor]:
    """Samples by inverse CDF: takes the first token whose cumulative probability exceeds the number of the row.

    logits: [rows, vocabulary]; -inf for a token that must not be sampled. temperatures: float32 [rows]; 0 takes the
    likeliest token. uniforms: float64 [rows] in (0, 1). Returns tokens, int64 [rows], and their
    log-softmax(truncation(logits / temperature)), float32 [rows]; temperature 0 counts as 1.

    The cumulative sums are float64, over blocks and then inside one block: float32 would lose the small ones of 150,000
    probabilities. Raises WeightsError when the logits of a row are not finite.
    """
    greedy = temperatures == 0
    scaled = logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None]
    if truncation:
        scaled = truncation(scaled)
    peak = scaled.amax(-1, keepdim=True)
    # pad and view: [rows, vocabulary] -> [rows, blocks, BLOCK]
    blocks = pad((scaled - peak).exp_(), (0, -scaled.shape[-1] % BLOCK)).view(len(scaled), -1, BLOCK)
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    total = ends[:, -1:].contiguous()
    if not bool(torch.isfinite(total).all()):
        raise WeightsError("the model's logits are not finite: its weights are damaged or its precision is too small")
    target = uniforms[:, None] * total
    block = torch.searchsorted(ends, target, right=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    # Rounding may have moved the rest outside the block; clamped, it never finds a token without mass.
    rest = torch.minimum((target - (ends - sums).gather(1, block)).clamp(min=0), BELOW * inside[:, -1:])
    tokens = block * BLOCK + torch.searchsorted(inside, rest, right=True)
    if bool(greedy.any()):
        tokens = torch.where(greedy[:, None], scaled.argmax(-1, keepdim=True), tokens)
    logprobs = (scaled.gather(-1, tokens) - peak).double() - total.log()
    return tokens[:, 0], logprobs[:, 0].float()


PREFILL_TOKENS = (2048, 32)
"""Tokens of prompts that a step computes beside a full batch, on other devices and on CPUs, where so many take about as
long as the samples do."""
MOST_DOUBLINGS = 20
"""Doublings of that budget after interruptions: a step then computes the longest prompt in one go."""


class TorchEngine:
    """Samples with continuous batching, on any device: `submit` at any time, and call `step` while it is `active`.

    All calls run on one thread. version: of the weights in use; with NO_WEIGHTS nothing is sampled before the first
    `load`. spec: names, shapes and dtype of weights for `load`. context: context length of the model in tokens, None if
    it has no limit. record: of the experts of each token, None where none is kept. active: whether `step` would sample
    a token now. waiting, running: requests without and with slots.

    folder: model and tokenizer, for from_pretrained. ranks: of a replica, each of which has an engine with some of the
    layers, or slices of them; the engines get the same calls in the same order (ranked_generation.py). `spec` is of
    what this rank has. failure: the error after which the ranks cannot go on, None as long as they can; `on_failure` is
    called once it is there. Raises ConfigError when the model's attention is not plain and causal, or ranks cannot
    share the layers out.
    """

    failure: PeerLost | None = None

    def __init__(self, folder: Path, config: Config, version: int = NO_WEIGHTS, ranks: RankMesh = ALONE) -> None:
        generation = config.generation
        refuse_rotation_by_longest_row(folder, config)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        # The memory of a device may hold the slices of a rank alone.
        model = load_model(folder, DTYPES[config.model.dtype], "cpu" if ranks.size > 1 else generation.device)
        if generation.deterministic and {Role.EXPERTS, Role.ROUTER} & {*roles_of(model).values()}:
            raise ConfigError(f"generation.deterministic: {folder}: {BY_NEIGHBOURS}")
        if config.model.lora is not None:
            attach(model, config.model.lora, config.seed)
            fill_for_probe(model)
        self.record = RecordShape.of(model.config.to_dict()) if config.training.router_replay else None
        self._position_cost = position_cost(model)
        self._flat = _verified(model, tokenizer, config, self.record, ranks)
        self._ranks = ranks
        self._config = config
        self._truncation = Truncation(generation.top_p, generation.top_k, generation.min_p)
        processor = PictureProcessor.of_folder(folder, config.task.max_picture_pixels)
        self.tokenizer = TokenizerWithStops(tokenizer, generation.stop, config.task.template_arguments, processor)
        self._end_ids = end_ids(model.generation_config, tokenizer)
        self.turns = TurnRenderer(self.tokenizer, self._end_ids)
        self._batch = RunningBatch(self._flat.slots, generation.max_new_tokens, record=self.record)
        self._memory = BlockMemory(self._flat.cache, self._batch)
        self.parked = self._memory.parked
        self._prefill_tokens = generation.prefill_tokens or PREFILL_TOKENS[generation.device == "cpu"]
        self._waiting: deque[SampleRequest] = deque()  # bounded by the gate, which bounds the groups in flight
        self.version = version
        self.on_failure: Callable[[], None] = lambda: None
        self._is_put_away = False
        self._owns_weights = True
        self.spec: WeightsSpec = of_stage(published_spec(model, config.model.dtype))
        self.context = context_of(model.config.get_text_config().to_dict())

    @property
    def running(self) -> int:
        return len(self._batch.requests)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def cache_used(self) -> float:
        """Returns the share of the KV cache that running and parked sequences own."""
        return self._flat.cache.used

    @property
    def preemptions(self) -> int:
        """Returns how often a running request lost its keys and values to others, and computed them again."""
        return self._memory.preemptions

    @property
    def active(self) -> bool:
        if self._is_put_away:
            return False
        return self.running > 0 or any(self._may_start(request) for request in self._waiting)

    def submit(self, *requests: SampleRequest) -> None:
        """Queues requests, which start in order of arrival once a slot is free and the weights are new enough. Raises
        ConfigError when prompt or completion does not fit into a slot."""
        refuse_too_long(requests, self._config)
        for request in requests:
            self._memory.prompts.want(request.prompt_key)
            self.parked.queue(request.key[:2])
        self._waiting.extend(requests)

    def step(self) -> list[Completion]:
        """Samples one token of every decoding request, and computes prompts of others within the budget of a step;
        returns the requests that finished."""
        self._admit()
        if self._config.generation.deterministic:
            self._compute_apart()
        else:
            self._compute_together()
        return [self._finish(row, finish) for row, finish in reversed(list(self._finished()))]

    def end(self, keys: Iterable[Key], finish: Finish) -> list[Completion]:
        """Ends requests now. Returns those that were running; requests that were waiting are removed."""
        return self._end(keys, finish)

    def forget(self, samples: Iterable[SampleName], oldest: int) -> None:
        """Gives up the keys and values kept for later turns of these samples, and of groups before `oldest`."""
        self.parked.forget(samples, oldest)

    def slice(self) -> AbstractContextManager[None]:
        """Returns a scope for consecutive steps, between which nothing else is called."""
        return nullcontext()

    def _end(self, keys: Iterable[Key], finish: Finish) -> list[Completion]:
        if not (wanted := set(keys)):
            return []  # Each slice asks, and nobody has to look at what waits.
        for request in [request for request in self._waiting if request.key in wanted]:
            self._waiting.remove(request)
            self._memory.prompts.had(request.prompt_key)
        rows = [row for row, request in enumerate(self._batch.requests) if request.key in wanted]
        self.parked.forget(wanted)
        return [self._finish(row, finish) for row in reversed(rows)]

    def begin_again(self) -> None:
        """Forgets all requests, and with the version of the weights everything computed with them: nothing is sampled
        before the next `load`."""
        self._end([request.key for request in (*self._waiting, *self._batch.requests)], "abort")
        self.version = NO_WEIGHTS
        self._memory.weights_changed(recompute=True)

    @property
    def device(self) -> torch.device:
        return self._flat.device

    def load(self, tensors: Mapping[str, Tensor], version: int, *, share: bool) -> None:
        """Uses these weights from the next step on; running requests continue. share: keep the tensors themselves, of
        the same device and dtype, which must not be written while in use. Raises WeightsError when a parameter is
        missing or tied names come with different values. Without `share` they are copied, into memory of the engine's
        own."""
        missing = [tensor.name for tensor in self.spec.tensors if tensor.name not in tensors]
        if missing:
            raise WeightsError(f"new weights lack {', '.join(missing)}")
        for alias, name in self.spec.aliases:
            tied = tensors.get(alias, tensors[name])
            if tied.data_ptr() != tensors[name].data_ptr() and not torch.equal(tied, tensors[name]):
                raise WeightsError(f"{alias} and {name} are tied in this model but were given different values")
        with torch.no_grad():
            for tensor in self.spec.tensors:
                parameter = self._flat.model.get_parameter(tensor.name)
                if share:
                    parameter.data = tensors[tensor.name]
                elif not self._owns_weights:  # They were put away, or are the tensors of somebody else.
                    parameter.data = tensors[tensor.name].to(parameter.device, parameter.dtype, copy=True)
                else:
                    parameter.copy_(tensors[tensor.name])
            self._flat.weights_changed()
        self._owns_weights = not share
        self.version = version
        self._is_put_away = False
        self._memory.weights_changed(recompute=self._config.generation.kv == "recompute")

    def put_away(self) -> None:
        """Frees the weights of `spec` and all keys and values, until the next `load`. Samples that run go on then; they
        are computed again up to where they were."""
        self._is_put_away = True
        self._owns_weights = False
        self._memory.weights_changed(recompute=True)
        for tensor in self.spec.tensors:
            parameter = self._flat.model.get_parameter(tensor.name)
            parameter.data = parameter.data.new_empty(0)
        self._flat.put_away()

    def logprobs_after(self, prompt: Ints) -> NDArray[np.float32]:
        """Returns the log-probs [vocabulary] of the token after a prompt at temperature 1."""
        found: NDArray[np.float32] = self._flat.logits_after(prompt).float().log_softmax(-1).cpu().numpy()
        return found

    def _may_start(self, request: SampleRequest) -> bool:
        return self.version != NO_WEIGHTS and request.not_before <= self.version

    def _admit(self) -> None:
        """Moves waiting requests into free slots; requests that need newer weights keep their place in the queue. No
        request starts while a running one lacks blocks."""
        early: list[SampleRequest] = []
        while self._waiting and self.running < self._config.generation.slots and not self._memory.scarce:
            request = self._waiting.popleft()
            if not self._may_start(request):
                early.append(request)
                continue
            self._batch.add(request)
            if request.drawn:
                self._memory.take_back(self.running - 1)
        self._waiting.extendleft(reversed(early))

    def _compute_together(self) -> None:
        """Computes one forward: decoding rows, and chunks of rows in prefill."""
        self._memory.share_prompts()
        self._memory.secure_next()
        decoding = self._batch.decoding
        prefilling = self._batch.prefilling
        budget = step_budget(self._prefill_tokens, len(decoding), self.running - len(decoding))
        # Weights may be new before a long prompt is computed; it then has more of each step, so that it starts at last.
        interruptions = int(self._batch.interrupted[prefilling[0]]) if len(prefilling) else 0
        budget *= 2.0 ** min(interruptions, MOST_DOUBLINGS)
        ready = np.array(self._memory.secure_prefills(budget), np.int64)
        decoding = self._batch.decoding
        lengths = self._batch.lengths(ready).tolist()
        prefills = [
            Prefill(row, int(self._batch.held[row]), length)
            for row, length in zip(ready.tolist(), lengths, strict=True)
        ]
        chunks = plan_chunks(prefills, budget, self._position_cost)
        if len(decoding) or chunks:
            self._forward(decoding, sorted(chunks, key=lambda chunk: (chunk.first > 0, chunk.end)))

    def _forward(self, decoding: Ints, chunks: list[Chunk]) -> None:
        """Samples the next token of the decoding rows, and of rows whose prefill ends."""
        sequences = {chunk.row: self._batch.sequence(chunk.row)[chunk.first : chunk.end] for chunk in chunks}
        held = {chunk.row: chunk.first for chunk in chunks}
        pictures = self._pictures([*decoding.tolist(), *sequences])
        logits = self._flat.logits(*self._newest(decoding), sequences, held, decoding, pictures)
        sampled = list(decoding)
        sources = list(range(len(decoding)))
        for source, chunk in enumerate(chunks, len(decoding)):
            followers = self._memory.computed(chunk.row, chunk.end)
            if chunk.last:
                sampled += [chunk.row, *followers]
                sources += [source] * (1 + len(followers))
        if sources != list(range(len(logits))):
            logits = logits[self._flat.tensor(np.array(sources, np.int64))]
        self._record(logits, np.array(sampled, np.int64))

    def _compute_apart(self) -> None:
        """Computes the decoding rows, and then each prompt in a forward of its own."""
        decoding = self._batch.decoding
        alike = dict[tuple[bytes, int], list[int]]()
        for row in self._batch.prefilling.tolist():
            own = row if self._batch.sampled[row] else -1
            alike.setdefault((self._batch.prompts[row], own), []).append(row)
        if len(decoding):
            idle = self._flat.slots - len(decoding)
            tokens, positions = (np.pad(each, (0, idle)) for each in self._newest(decoding))
            pictures = self._pictures(decoding.tolist())
            self._record(self._flat.logits(tokens, positions, pictures=pictures), decoding)
        for first, *others in alike.values():
            tokens = self._batch.sequence(first)
            logits = self._flat.logits(NOTHING, NOTHING, {first: tokens}, pictures=self._pictures([first]))
            self._flat.cache.copy(first, others, len(tokens))
            self._record(logits.expand(1 + len(others), -1), np.array([first, *others]))

    def _pictures(self, rows: Iterable[int]) -> dict[int, PromptPictures]:
        """Returns the pictures of those of these rows whose prompts have any."""
        found = {row: self._batch.requests[row].pictures for row in rows}
        return {row: pictures for row, pictures in found.items() if pictures is not None}

    def _record(self, logits: Tensor, rows: Ints) -> None:
        """Samples from the logits of these rows, which may have further logits behind them."""
        if len(rows):
            tokens, logprobs = self._sample(logits[: len(rows)], rows)
            self._memory.cached(rows)
            self._batch.note_experts(rows, self._flat.cache.recall)
            self._batch.record(rows, tokens, logprobs, self.version)

    def _sample(self, logits: Tensor, rows: Ints) -> tuple[Ints, NDArray[np.float32]]:
        temperatures = np.array([self._batch.requests[row].temperature for row in rows], np.float32)
        tensors = self._flat.tensor(temperatures), self._flat.tensor(self._batch.uniforms(rows))
        tokens, logprobs = sample(logits, *tensors, self._truncation)
        if self._ranks.size > 1:  # Another kind of processor may round the same logits differently.
            drawn = self._ranks.everyone.shared(torch.stack([tokens.double(), logprobs.double()]), 0)
            tokens = drawn[0].long()
            logprobs = drawn[1].float()
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _newest(self, rows: Ints) -> tuple[Ints, Ints]:
        """Returns newest tokens and their positions."""
        return self._batch.newest(rows), self._batch.lengths(rows) - 1

    def _finished(self) -> Iterator[tuple[int, Finish]]:
        batch = self._batch
        rows = np.flatnonzero(batch.sampled[: self.running])
        ended = np.isin(batch.newest(rows), self._end_ids)
        overdue = batch.overdue(rows)
        for index, row in enumerate(rows.tolist()):
            if ended[index]:
                yield row, "stop"
            elif self.tokenizer.stops(batch.tokens[row, : batch.sampled[row]]):
                yield row, "stop_string"
            elif batch.sampled[row] >= batch.requests[row].max_new_tokens or overdue[index]:
                yield row, "length"

    def _finish(self, row: int, finish: Finish) -> Completion:
        tokens = self._batch.tokens[row, : self._batch.sampled[row]]
        text = self.tokenizer.before_stop(tokens) if finish == "stop_string" else self.tokenizer.decode(tokens)
        completion = self._batch.completion(row, finish, text)
        goes_on = completion.request.may_go_on and finish != "abort" and not self._config.generation.deterministic
        self._memory.leave(row, park=goes_on)
        return completion


def _verified(model: Any, tokenizer: Any, config: Config, record: RecordShape | None, ranks: RankMesh) -> FlatModel:
    """Returns the model over a flat row of tokens, compared with transformers, with the slices of this rank."""
    slots = engine_slots(config)
    limit = longest_row(config)
    shape = model.config.get_text_config()
    probe = probe_tokens(tokenizer, shape, limit)
    stages = config.training.layout.pp
    layers = None if ranks.size == 1 else len(layers_of_stage(shape.num_hidden_layers, stages, ranks.stages.size, 0))
    expected = probe_logprobs(model, probe)
    refuse_slices(model, config, ranks, fast=is_llama_like(model))
    flat = FlatModel(
        model,
        slots,
        limit,
        vocabulary_size(tokenizer),
        fixed=config.generation.deterministic,
        float32_head=config.model.float32_head,
        blocks=cache_blocks(config, shape, slots, ranks.tensor.size, layers),
        record=record,
    )
    if ranks.size == 1:
        flat.verify(probe, expected)
    else:
        flat.verify_whole(probe, expected)
        refuse_slices(model, config, ranks, fast=flat.fast)
        flat.share_out(ranks, torch.device(config.generation.device), stages)
    return flat


def position_cost(model: Any) -> float:
    """Returns the cost of attention to one position, where the other products of one token cost 1: 4 d operations in
    each layer, d numbers wide, against 2 for each parameter."""
    shape = model.config.get_text_config()
    width = shape.num_attention_heads * (
        getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    )
    return float(2 * shape.num_hidden_layers * width / model.num_parameters())


# An engine that answers with the samples of a file instead of sampling (`generation.stored_samples`).


CHECKED_PROMPTS = 32
"""Prompts of which a sample is decoded, to find tokens of another tokenizer."""


class StoredSampleEngine(TorchEngine):
    """Completes each request at once with a stored sample: its tokens, the log-probs of the policy that sampled them,
    and the version of the weights now in use, since versions of another run say nothing about this one. The model takes
    over weights as ever, for the canary and for evaluations elsewhere.

    Raises TaskError for a file that cannot be trained, and ConfigError for tokens of another tokenizer.
    """

    def __init__(self, folder: Path, config: Config, version: int = NO_WEIGHTS) -> None:
        super().__init__(folder, config, version)
        self._stored = read_stored_samples(Path(config.generation.stored_samples), config.task.samples_per_prompt)
        checked = self._stored.some(CHECKED_PROMPTS)
        if any(not self.tokenizer.decode(sample.tokens).startswith(sample.text) for sample in checked):
            path = self._stored.path
            model = config.model.name
            raise ConfigError(f"generation.stored_samples: {path} has tokens of another tokenizer than {model}")
        self._asked: deque[SampleRequest] = deque()

    @property
    def waiting(self) -> int:
        return len(self._asked)

    @property
    def active(self) -> bool:
        return any(self._may_start(request) for request in self._asked)

    def submit(self, *requests: SampleRequest) -> None:
        refuse_too_long(requests, self._config)
        for request in requests:
            self._stored.check(request.prompt)
        self._asked.extend(requests)

    def step(self) -> list[Completion]:
        ready = [request for request in self._asked if self._may_start(request)]
        self._asked = deque(request for request in self._asked if not self._may_start(request))
        return [self._completion(request) for request in ready]

    def begin_again(self) -> None:
        self._asked.clear()
        super().begin_again()

    def end(self, keys: Iterable[Key], finish: Finish) -> list[Completion]:
        if wanted := set(keys):
            self._asked = deque(request for request in self._asked if request.key not in wanted)
        return []

    def _completion(self, request: SampleRequest) -> Completion:
        group, member, _ = request.key
        stored = self._stored.sample(request.prompt, group, member)
        versions = np.full(len(stored.tokens), self.version, np.int32)
        finish = cast(Finish, stored.finish)
        asked = replace(request, prompt=stored.prompt, max_new_tokens=len(stored.tokens))
        return Completion(asked, stored.tokens, stored.logprobs, versions, finish, stored.text)
