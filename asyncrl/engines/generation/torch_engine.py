"""The `torch` engine: continuous batching over slots, one flat forward a step.

A step samples one token of every running sample: those that decode give their newest token, those just admitted (and
all, after new weights under `kv = "recompute"`) their whole sequence; both ride in the same forward. Samples of one
group that start together share the forward of their prompt. The last row fills the place of a finished one, so rows in
use stay a prefix.

Deterministic mode fixes every shape a sample can see: all slots decode, attention spans the whole slot, and each prompt
has a forward of its own. Rows and masked positions then change no bit of another row.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from asyncrl.config import Config
from asyncrl.context import context_of
from asyncrl.engines.generation.forward import NOTHING, FlatModel, Whole
from asyncrl.engines.generation.interface import NO_WEIGHTS, Completion, Finish, Key, Request
from asyncrl.engines.generation.running import RunningTable
from asyncrl.engines.generation.sampling import sample
from asyncrl.engines.generation.support import load_model, probe_logprobs, verify
from asyncrl.engines.generation.text import Texts, end_ids
from asyncrl.engines.probe import probe_ids
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.weights.spec import DTYPES, WeightsSpec, spec_of

WHOLE_TOKENS = 8192  # tokens of whole sequences in one forward: bounds its activations, not what a step admits
FIXED_ROWS = 4  # matrix products over 1 to 3 rows round differently from those over more


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """slots: samples decoded together. max_prompt_tokens + max_new_tokens positions are a slot."""

    slots: int = 32
    max_prompt_tokens: int = 512
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    kv: Literal["keep", "recompute"] = "keep"
    deterministic: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    float32_head: bool = False
    device: str = "cpu"

    @classmethod
    def of(cls, config: Config) -> Self:
        generation = config.generation
        return cls(
            slots=generation.slots,
            max_prompt_tokens=config.task.max_prompt_tokens,
            max_new_tokens=generation.max_new_tokens,
            stop=generation.stop,
            kv=generation.kv,
            deterministic=generation.deterministic,
            dtype=config.model.dtype,
            float32_head=config.model.float32_head,
            device=generation.device,
        )


class TorchEngine:
    """Implements GenerationEngine on torch, on any device.

    Args:
        folder: model and tokenizer, for from_pretrained.
        version: of the weights in the folder; NO_WEIGHTS: sample nothing before the first `load`.

    Raises:
        ConfigError: the model's attention is not plain and causal.
    """

    def __init__(self, folder: Path, settings: EngineSettings, version: int = NO_WEIGHTS) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = load_model(folder, DTYPES[settings.dtype], settings.device)
        probed = probe_ids(tokenizer)
        expected = probe_logprobs(model, probed)
        fixed = settings.deterministic
        slots = max(settings.slots, FIXED_ROWS) if fixed else settings.slots
        limit = settings.max_prompt_tokens + settings.max_new_tokens
        self._flat = FlatModel(model, slots, limit, len(tokenizer), fixed=fixed, float32_head=settings.float32_head)
        verify(self._flat, probed, expected)
        self._settings = settings
        self._texts = Texts(tokenizer, settings.stop)
        self._end_ids = end_ids(model.generation_config, tokenizer)
        self._table = RunningTable(slots, settings.max_new_tokens)
        self._waiting: deque[Request] = deque()  # bounded by the gate, which admits no more than the groups in flight
        self._shared = False
        self.version = version
        self.spec: WeightsSpec = spec_of(model, settings.dtype)
        self.token_bytes = self._texts.longest()
        self.context = context_of(model.config.get_text_config().to_dict())

    @property
    def running(self) -> int:
        return self._table.count

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> bool:
        return self.running > 0 or any(self._may_start(request) for request in self._waiting)

    def tokenize(self, prompt: str | list[dict[str, Any]]) -> NDArray[np.int32]:
        return self._texts.prompt_ids(prompt)

    def decode(self, tokens: NDArray[np.int32]) -> str:
        return self._texts.decode(tokens)

    def submit(self, request: Request) -> None:
        for name, found in (("max_new_tokens", request.max_new_tokens), ("max_prompt_tokens", len(request.prompt))):
            most = getattr(self._settings, name)
            if not 0 < found <= most:
                section = "generation" if name == "max_new_tokens" else "task"
                raise ConfigError(f"group {request.key[0]} asks for {found} tokens where {section}.{name} is {most}")
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        self._admit()
        for decoding, whole in self._forwards():
            self._forward(decoding, whole)
        return [self._finish(row, finish) for row, finish in reversed(list(self._finished()))]

    def end(self, keys: Iterable[Key], finish: Finish) -> list[Completion]:
        wanted = set(keys)
        self._waiting = deque(request for request in self._waiting if request.key not in wanted)
        rows = [row for row, request in enumerate(self._table.requests) if request.key in wanted]
        return [self._finish(row, finish) for row in reversed(rows)]

    def load(self, tensors: Mapping[str, Tensor], version: int, *, share: bool) -> None:
        """Use these weights from the next step on; running sequences go on.

        share: keep the tensors themselves (same device and dtype), which must not be written while they are in use.

        Raises:
            WeightsError: a parameter is missing, or tied names come with different values.
        """
        self._check(tensors)
        assert share or not self._shared, "copying would write into the tensors that are shared"
        self._shared = share
        with torch.no_grad():
            for name, parameter in self._flat.model.named_parameters():
                if share:
                    parameter.data = tensors[name]
                else:
                    parameter.copy_(tensors[name])
            self._flat.weights_changed()
        self.version = version
        if self._settings.kv == "recompute":
            self._table.cached[:] = False

    def logprobs_after(self, prompt: NDArray[np.int64]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._flat.logits_after(prompt).float().log_softmax(-1).cpu().numpy()
        return found

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        missing = [tensor.name for tensor in self.spec.tensors if tensor.name not in tensors]
        if missing:
            raise WeightsError(f"new weights lack {', '.join(missing)}")
        for alias, name in self.spec.aliases:
            tied = tensors.get(alias, tensors[name])
            if tied.data_ptr() != tensors[name].data_ptr() and not torch.equal(tied, tensors[name]):
                raise WeightsError(f"{alias} and {name} are tied in this model but were given different values")

    def _may_start(self, request: Request) -> bool:
        return self.version != NO_WEIGHTS and request.not_before <= self.version

    def _admit(self) -> None:
        early: list[Request] = []  # their weights have not come yet
        while self._waiting and self.running < self._settings.slots:
            request = self._waiting.popleft()
            if self._may_start(request):
                self._table.add(request)
            else:
                early.append(request)
        self._waiting.extendleft(reversed(early))

    def _forwards(self) -> Iterator[tuple[int, list[list[int]]]]:
        """The forwards of a step: rows that decode, and families of rows whose sequences are not cached."""
        decoding = self._table.decoding
        families = list(self._families(decoding))
        if self._settings.deterministic:
            parts = [[family] for family in families]
            if decoding:
                yield decoding, []
        else:
            parts = list(self._parts(families))
            if decoding:
                yield decoding, parts.pop(0) if parts else []
        yield from ((0, part) for part in parts)

    def _families(self, first: int) -> Iterable[list[int]]:
        """Rows from `first` on that can share one forward: the same prompt, nothing sampled yet."""
        families: dict[tuple[int, int], list[int]] = {}
        for row in range(first, self.running):
            apart = row if self._table.sampled[row] else -1
            families.setdefault((id(self._table.requests[row].prompt), apart), []).append(row)
        return families.values()

    def _parts(self, families: Sequence[list[int]]) -> Iterator[list[list[int]]]:
        part: list[list[int]] = []
        tokens = 0
        for family in families:
            length = self._table.length(family[0])
            if part and tokens + length > WHOLE_TOKENS:
                yield part
                part, tokens = [], 0
            part.append(family)
            tokens += length
        if part:
            yield part

    def _forward(self, decoding: int, families: list[list[int]]) -> None:
        """Sample the next token of the first `decoding` rows and of the families."""
        whole = [Whole(family[0], self._table.sequence(family[0])) for family in families]
        logits = self._flat.logits(*self._newest(decoding), whole)
        singles = len(logits) - len(whole)
        copies = [singles + index for index, family in enumerate(families) for _ in family]
        rows = np.array([*range(decoding), *(row for family in families for row in family)], np.int64)
        if len(rows) != len(logits):
            logits = logits[self._flat.tensor(np.array([*range(decoding), *copies], np.int64))]
        tokens, logprobs = self._draw(logits, rows)
        for family, sequence in zip(families, whole, strict=True):
            if len(family) > 1:
                self._flat.cache.copy(family[0], family[1:], len(sequence.tokens))
        self._table.record(rows, tokens, logprobs, self.version)

    def _draw(self, logits: Tensor, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The next token of each row and its log-probability."""
        temperatures, uniforms = self._table.temperatures[rows], self._table.uniforms(rows)
        tokens, logprobs = sample(logits, self._flat.tensor(temperatures), self._flat.tensor(uniforms))
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _newest(self, decoding: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Newest tokens and their positions. In deterministic mode idle slots decode along, at position 0."""
        if decoding == 0:
            return NOTHING, NOTHING
        idle = self._flat.slots - decoding if self._settings.deterministic else 0
        table = self._table
        positions = table.prompt_tokens[:decoding] + table.sampled[:decoding] - 1
        return np.pad(table.newest(decoding), (0, idle)), np.pad(positions, (0, idle))

    def _finished(self) -> Iterator[tuple[int, Finish]]:
        table, count = self._table, self.running
        ended = np.isin(table.newest(count), self._end_ids)
        full = table.sampled[:count] >= table.budget[:count]
        for row in range(count):
            if ended[row]:
                yield row, "stop"
            elif self._settings.stop and self._texts.stops(table.tokens[row, : table.sampled[row]]):
                yield row, "stop_string"
            elif full[row]:
                yield row, "length"

    def _finish(self, row: int, finish: Finish) -> Completion:
        table = self._table
        request, sampled = table.requests[row], table.recorded(row)
        last = self.running - 1
        self._flat.cache.release(row)
        self._flat.cache.swap(row, last)
        table.remove(row)
        text = self._texts.before_stop(sampled.tokens) if finish == "stop_string" else self.decode(sampled.tokens)
        return Completion(request, sampled.tokens, sampled.logprobs, sampled.versions, finish, text)
