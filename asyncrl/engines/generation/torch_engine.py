"""The `torch` engine: continuous batching over slots, with one flat forward per step.

A step samples one token of every running sample. Decoding samples contribute their newest token; new samples, and all
samples after new weights under `kv = "recompute"`, are in prefill and contribute their whole sequence. Both share one
forward. Samples of a group that start together share the prefill of their prompt. A turn that goes on takes back the
keys and values that were parked for it, and prefills only what it was given since.

The deterministic mode fixes every shape that a sample can see: all slots decode, attention covers the whole slot, and
each prompt has a forward of its own. Other rows and masked positions then do not change the bits of a sample.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import probe_tokens
from asyncrl.engines.generation.forward.flat_model import NOTHING, FlatModel, load_model, probe_logprobs
from asyncrl.engines.generation.parked_sequences import ParkedSequence, ParkedSequences
from asyncrl.engines.generation.running_batch import RunningBatch
from asyncrl.engines.generation.sample_requests import (
    NO_WEIGHTS,
    Completion,
    Finish,
    Key,
    SampleRequest,
    refuse_too_long,
)
from asyncrl.engines.generation.sampling import sample
from asyncrl.engines.generation.tokenization import TokenizerWithStops, end_ids
from asyncrl.engines.generation.turn_rendering import TurnRenderer
from asyncrl.engines.lora.low_rank import attach, fill_for_probe, published_spec
from asyncrl.engines.model_loading import vocabulary_size
from asyncrl.engines.models.model_folder import context_of, longest_row
from asyncrl.engines.models.row_length import refuse_rotation_by_longest_row
from asyncrl.errors import WeightsError
from asyncrl.lanes.weights.tensor_spec import DTYPES, WeightsSpec

PREFILL_TOKENS = 8192  # prefill tokens per forward; bounds its activations, not what a step admits
FIXED_ROWS = 16
"""Fewest slots of deterministic mode: products over fewer rows than 4 (an AMD EPYC) or 16 (an Intel Xeon, of vectors of
576 numbers and more) round differently from larger ones."""

SharedPrefill = list[int]  # rows with the same prompt, which share one prefill; the first row computes it


class TorchEngine:
    """Samples with continuous batching, on any device: `submit` at any time, and call `step` while it is `active`.

    All calls run on one thread. version: of the weights in use; with NO_WEIGHTS nothing is sampled before the first
    `load`. spec: names, shapes and dtype of weights for `load`. context: context length of the model in tokens, None if
    it has no limit. active: whether `step` would sample a token now. waiting, running: requests without and with slots.

    folder: model and tokenizer, for from_pretrained. Raises ConfigError when the model's attention is not plain and
    causal.
    """

    def __init__(self, folder: Path, config: Config, version: int = NO_WEIGHTS) -> None:
        generation = config.generation
        refuse_rotation_by_longest_row(folder, config)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = load_model(folder, DTYPES[config.model.dtype], generation.device)
        if config.model.lora is not None:
            attach(model, config.model.lora, config.seed)
            fill_for_probe(model)
        limit = longest_row(config)
        probe = probe_tokens(tokenizer, model.config, limit)
        expected = probe_logprobs(model, probe)
        fixed, exact = generation.deterministic, config.model.float32_head
        slots = max(generation.slots, FIXED_ROWS) if fixed else generation.slots
        self._flat = FlatModel(model, slots, limit, vocabulary_size(tokenizer), fixed=fixed, float32_head=exact)
        self._flat.verify(probe, expected)
        self._config = config
        self.tokenizer = TokenizerWithStops(tokenizer, generation.stop)
        self._end_ids = end_ids(model.generation_config, tokenizer)
        self.turns = TurnRenderer(self.tokenizer, self._end_ids)
        self._batch = RunningBatch(slots, generation.max_new_tokens)
        self.parked = ParkedSequences()
        self._waiting: deque[SampleRequest] = deque()  # bounded by the gate, which bounds the groups in flight
        self.version = version
        self.spec: WeightsSpec = published_spec(model, config.model.dtype)
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
    def active(self) -> bool:
        return self.running > 0 or any(self._may_start(request) for request in self._waiting)

    def submit(self, *requests: SampleRequest) -> None:
        """Queues requests, which start in order of arrival once a slot is free and the weights are new enough. Raises
        ConfigError when prompt or completion does not fit into a slot."""
        refuse_too_long(requests, self._config)
        self._waiting.extend(requests)

    def step(self) -> list[Completion]:
        """Samples one token of every running request; returns the requests that finished."""
        self._admit()
        decoding = self._batch.decoding
        for prefills in self._prefills(decoding):
            if decoding or prefills:
                self._forward(decoding, prefills)
            decoding = 0
        done = [self._finish(row, finish) for row, finish in reversed(list(self._finished()))]
        if self.parked:
            self.parked.evict_to(self._flat.cache.room)
        return done

    def end(self, keys: Iterable[Key], finish: Finish) -> list[Completion]:
        """Ends requests now. Returns those that were running; requests that were waiting are removed."""
        wanted = set(keys)
        self._waiting = deque(request for request in self._waiting if request.key not in wanted)
        rows = [row for row, request in enumerate(self._batch.requests) if request.key in wanted]
        self.parked.forget(wanted)
        return [self._finish(row, finish) for row in reversed(rows)]

    @property
    def device(self) -> torch.device:
        found: torch.device = self._flat.model.device
        return found

    def load(self, tensors: Mapping[str, Tensor], version: int, *, share: bool) -> None:
        """Uses these weights from the next step on; running requests continue. share: keep the tensors themselves, of
        the same device and dtype, which must not be written while in use. Raises WeightsError when a parameter is
        missing or tied names come with different values."""
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
                else:
                    parameter.copy_(tensors[tensor.name])
            self._flat.weights_changed()
        self.version = version
        if self._config.generation.kv == "recompute":
            self._batch.uncache()
            self.parked.clear()

    def logprobs_after(self, prompt: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the log-probs [vocabulary] of the token after a prompt at temperature 1."""
        found: NDArray[np.float32] = self._flat.logits_after(prompt).float().log_softmax(-1).cpu().numpy()
        return found

    def _may_start(self, request: SampleRequest) -> bool:
        return self.version != NO_WEIGHTS and request.not_before <= self.version

    def _admit(self) -> None:
        """Moves waiting requests into free slots; requests that need newer weights keep their place in the queue."""
        early: deque[SampleRequest] = deque()
        for request in self._waiting:
            if self.running < self._config.generation.slots and self._may_start(request):
                self._batch.add(request, time.monotonic())
                if request.drawn:
                    self._take_back(self.running - 1)
            else:
                early.append(request)
        self._waiting = early

    def _take_back(self, row: int) -> None:
        """Gives a row that goes on the keys and values that were parked for it."""
        request = self._batch.requests[row]
        if (parked := self.parked.take(request.key[:2], request.prompt)) is not None:
            self._batch.held[row] = len(parked.tokens)
            self._flat.cache.copy_in(row, len(parked.tokens), parked.states)

    def _park(self, row: int) -> None:
        """Keeps the keys and values of a row: of all tokens but the newest."""
        tokens = self._batch.sequence(row)[:-1]
        group, member, attempt = self._batch.requests[row].key
        states = self._flat.cache.copy_out(row, len(tokens))
        self.parked.park((group, member), ParkedSequence(tokens, states, attempt))

    def _prefills(self, first: int) -> list[list[SharedPrefill]]:
        """Distributes the prefills of the rows from `first` on over forwards, of which the first one decodes as well.

        Rows share a prefill if they have the same prompt and nothing was sampled yet. A forward has at most
        PREFILL_TOKENS tokens, or one longer sequence; in deterministic mode it has one prefill, or only decodes.
        Sequences that go on come last, the shortest first, because attention pads them to the longest.
        """
        held, prefills = self._batch.held, dict[tuple[int, int], SharedPrefill]()
        lengths = self._batch.lengths(self.running) - held[: self.running]
        for row in range(first, self.running):
            own = row if self._batch.sampled[row] else -1
            prefills.setdefault((id(self._batch.requests[row].prompt), own), []).append(row)
        forwards: list[list[SharedPrefill]] = [[]]
        tokens = padded = 0
        for prefill in sorted(prefills.values(), key=lambda rows: lengths[rows[0]] if held[rows[0]] else 0):
            length = int(lengths[prefill[0]])
            more = length
            if held[prefill[0]]:
                more += padded * (length - int(lengths[forwards[-1][-1][0]])) if padded else 0
                padded += 1
            tokens += more
            if self._config.generation.deterministic or (forwards[-1] and tokens > PREFILL_TOKENS):
                forwards.append([])
                tokens, padded = length, int(held[prefill[0]] > 0)
            forwards[-1].append(prefill)
        return forwards

    def _forward(self, decoding: int, prefills: list[SharedPrefill]) -> None:
        """Samples the next token of the first `decoding` rows and of all rows of the prefills."""
        held = {prefill[0]: int(self._batch.held[prefill[0]]) for prefill in prefills}
        sequences = {row: self._batch.sequence(row)[first:] for row, first in held.items()}
        logits = self._flat.logits(*self._newest(decoding), sequences, held)
        first = len(logits) - len(sequences)
        copies = [first + index for index, prefill in enumerate(prefills) for _ in prefill]
        rows = np.array([*range(decoding), *chain.from_iterable(prefills)], np.int64)
        if len(rows) != len(logits):
            logits = logits[self._flat.tensor(np.array([*range(decoding), *copies], np.int64))]
        tokens, logprobs = self._sample(logits, rows)
        for source, *others in prefills:
            self._flat.cache.copy(source, others, len(sequences[source]))
        self._batch.record(rows, tokens, logprobs, self.version)

    def _sample(self, logits: Tensor, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        temperatures = np.array([self._batch.requests[row].temperature for row in rows], np.float32)
        tensors = self._flat.tensor(temperatures), self._flat.tensor(self._batch.uniforms(rows))
        tokens, logprobs = sample(logits, *tensors)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _newest(self, decoding: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns newest tokens and their positions. In deterministic mode idle slots decode too, at position 0."""
        if decoding == 0:
            return NOTHING, NOTHING
        idle = self._flat.slots - decoding if self._config.generation.deterministic else 0
        return np.pad(self._batch.newest(decoding), (0, idle)), np.pad(self._batch.lengths(decoding) - 1, (0, idle))

    def _finished(self) -> Iterator[tuple[int, Finish]]:
        batch, count = self._batch, self.running
        ended = np.isin(batch.newest(count), self._end_ids)
        overdue = batch.ends_at[:count] <= time.monotonic()
        for row in range(count):
            if ended[row]:
                yield row, "stop"
            elif self.tokenizer.stops(batch.tokens[row, : batch.sampled[row]]):
                yield row, "stop_string"
            elif batch.sampled[row] >= batch.requests[row].max_new_tokens or overdue[row]:
                yield row, "length"

    def _finish(self, row: int, finish: Finish) -> Completion:
        tokens = self._batch.tokens[row, : self._batch.sampled[row]]
        text = self.tokenizer.before_stop(tokens) if finish == "stop_string" else self.tokenizer.decode(tokens)
        completion = self._batch.completion(row, finish, text)
        if completion.request.may_go_on and finish != "abort" and not self._config.generation.deterministic:
            self._park(row)
        self._flat.cache.free(row)
        self._flat.cache.swap(row, self.running - 1)
        self._batch.remove(row)
        return completion
