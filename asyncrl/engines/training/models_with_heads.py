"""Models with their heads, for trainer, reference, critic and reward model: how they are loaded and shared out over
ranks, and the values, scores or log-probs that they give to tokens.

Trainer and reference compute log-probs of sampled tokens only here (`token_logprobs`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from asyncrl.engines.models.model_families import OTHERS, TRAINED, RecordShape, can_pack
from asyncrl.engines.models.model_folder import is_in_parts, refuse_damaged
from asyncrl.engines.models.model_loading import (
    NotInSlices,
    OutputScaling,
    load_pretrained,
    load_pretrained_classifier,
    sliced_weights,
    unfilled_model,
    vocabulary_size,
)
from asyncrl.engines.models.picture_input import PictureInput, picture_layout
from asyncrl.engines.models.prompt_pictures import PROCESSOR
from asyncrl.engines.models.router_replay import RouterReplay
from asyncrl.engines.models.scoring_models import ANOTHER_TOKENIZER, HEADS
from asyncrl.engines.models.tensor_parts import StoredTensor, stored_tensors
from asyncrl.engines.ranks.parallel_layers import SEQUENCE, attend_in_slices, joined, share_out_experts, split_layers
from asyncrl.engines.ranks.pipeline import Ending, PipelineRank, StageWeights, keep_stage
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.engines.ranks.shards import HeldModel, shard_model
from asyncrl.engines.training.micro_batches import ModelInput, ModelRows, lay_out_rows, split_by_row
from asyncrl.engines.training.packed_rows import NAME, PACKED
from asyncrl.engines.training.train_rows import Ids, ModelRow, SampleRow, TrainRow
from asyncrl.errors import ConfigError

Found = TypeVar("Found")
PassRunner: TypeAlias = Callable[[Callable[[], Any]], Any]
Precision = Literal["float32", "bfloat16"]

HEAD_TOLERANCE = 1e-3
IDLE = SampleRow(np.zeros(1, np.int64), np.zeros(1, np.int64))
"""A row that counts for nothing."""


class Unfilled(NamedTuple):
    """Describes where the weights of a model without memory are, and where they go. zeros: those of a new head."""

    device: str
    weights: Mapping[str, StoredTensor]
    zeros: frozenset[str] = frozenset()


class LoadedModel:
    """Holds a transformers model. Its body maps ids to hidden states, its head maps these to the output.

    whole: the model with float32 weights. source_config, tokenizer: as loaded, for checkpoints. processor: the file
    that describes its image processor, None where there is none. precision: of the
    computation; bfloat16 is autocast over the float32 weights. packs: see `lay_out_rows`. scored: the tokens whose
    output its own forward returns. is_random: whether dropout acts in training, so that a pass that is computed again
    must draw the same numbers. replay: of experts that generation chose, else None. pipeline, stage_weights: where this
    rank is one stage of several. sequence: the ranks that compute slices of the same rows. unfilled: the weights of a
    model without memory, which `share_out` gives each rank its parts of. loaded_whole: why a rank that takes parts
    loaded all weights; "" where it did not. Raises ConfigError when its own forward has another output than head and
    body.
    """

    def __init__(
        self,
        whole: Any,
        head: Any,
        source_config: Any,
        folder: Path,
        precision: Precision,
        scored: slice = slice(None),
        unfilled: Unfilled | None = None,
    ) -> None:
        self.whole = whole
        self.head = head
        self.source_config = source_config
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        processor = folder / PROCESSOR
        self.processor = processor.read_bytes() if processor.is_file() else None
        self.device: torch.device = whole.device if unfilled is None else torch.empty(0, device=unfilled.device).device
        self.packs = can_pack(whole.config.to_dict())
        if self.packs:
            whole.set_attn_implementation(NAME)
        self.is_random = False
        self.replay: RouterReplay | None = None
        self._precision = precision
        self._root: PassRunner | None = None
        self._backward: Callable[[Tensor], None] | None = None
        self.pipeline: PipelineRank | None = None
        self.stage_weights: StageWeights | None = None
        self.sequence: Ranks | None = None
        self._folder = folder
        self._scored = scored
        self._unfilled = unfilled
        self.loaded_whole = ""
        if unfilled is None:
            self._check_head()

    def share_out(self, mesh: RankMesh) -> None:
        """Keeps the layers of a stage, splits layers, and shares out experts and weights, over the ranks where the mesh
        says so; a model without memory gets the parts of this rank. Raises ConfigError as `PipelineRank.of`,
        `keep_stage`, `split_layers`, `share_out_experts`, `shard_model` and `attend_in_slices`, and JournalError as
        `HeldModel.fill`."""
        if mesh.sequence.size > 1:
            attend_in_slices(self.whole, mesh.sequence.size)
            self.sequence = mesh.sequence
            self.packs = False
        if mesh.piping is not None:
            self.pipeline = PipelineRank.of(mesh, self.whole.config.hidden_size, self.device)
            self.stage_weights = keep_stage(self.whole, mesh)
        if mesh.splitting is not None:
            with mesh.failing():
                split_layers(self.whole, mesh.splitting, mesh.key, self.stage_weights)
        if mesh.routing is not None:
            share_out_experts(self.whole, mesh, self.device)
        if mesh.sharding is not None:
            self._root = shard_model(self.whole, mesh.sharding, self.device, mesh.key)
        if self._unfilled is not None:
            held = HeldModel(self.whole, self.stage_weights, mesh)
            held.fill(self._unfilled.weights, self.device, zeros=self._unfilled.zeros)
            self._unfilled = None
            if not self._has_known_output():
                with mesh.failing():
                    self.in_pass(self._check_head)

    def _has_known_output(self) -> bool:
        """Returns whether head and body are known to compute what the model's own forward does, which a pass of ranks
        with shards would gather weights to find out."""
        return False

    def run_by(self, root: PassRunner, backward: Callable[[Tensor], None]) -> None:
        """Has another engine run all passes from now on. root: runs a computation with body and head."""
        self._root = root
        self._backward = backward

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss, which is this rank's part of the sum over all ranks."""
        if self._backward is None:
            torch.autograd.backward(loss)
        else:
            self._backward(loss)

    def in_pass(self, compute: Callable[[], Found]) -> Found:
        """Runs a computation with body and head. Sharded weights need it to be one, and all ranks to run it."""
        if self._root is None:
            return compute()
        found: Found = self._root(compute)
        return found

    def hidden(self, ids: Tensor, experts: Tensor | None = None, **layout: Any) -> Tensor:
        """Computes hidden states [rows, length, width] of ids [rows, length]. Rows are right-padded: under causal
        attention no real token sees the padding, so that separate rows need no mask. layout: `position_ids` and
        PACKED of packed rows, SEQUENCE for slices of rows."""
        if self.replay is not None:
            self.replay.follow(experts)
        with self._autocast():
            states: Tensor = self.whole.base_model(input_ids=ids, use_cache=False, **layout).last_hidden_state
        return states

    def states(self, rows: ModelRows) -> Tensor:
        """Computes the hidden states [tokens, width] that predict the response tokens of these rows. Of several passes
        each keeps only these states; the backward pass recomputes one pass after the other."""
        if rows.order is None:
            return self._states_of_pass(rows.passes[0])
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.is_random}
        found = [checkpoint(self._states_of_pass, each, **options) for each in rows.passes]
        return torch.cat(found)[rows.order]

    def _states_of_pass(self, rows: ModelInput) -> Tensor:
        return self.stage_states(rows)[rows.positions]

    def stage_states(self, rows: ModelInput, received: Tensor | None = None) -> Tensor:
        """Computes the hidden states [rows x length, width] of one pass. received: those of the stage before, where
        this rank is not the first stage of a pipeline."""
        if rows.pictures is not None:
            return self._seen_states(rows.ids, rows.pictures)
        found = {"position_ids": rows.position_ids, PACKED: rows.attention}
        layout: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
        layout |= {} if self.sequence is None else {SEQUENCE: self.sequence}
        if received is None:
            return self.hidden(rows.ids, rows.experts, **layout).flatten(0, 1)
        with self._autocast():
            given = received.reshape(*rows.ids.shape, -1)
            states: Tensor = self.whole.base_model(inputs_embeds=given, use_cache=False, **layout).last_hidden_state
        return states.flatten(0, 1)

    def _seen_states(self, ids: Tensor, pictures: PictureInput) -> Tensor:
        """Computes the hidden states of rows whose prompts have pictures."""
        with self._autocast():
            layout = picture_layout(self.whole, ids, pictures)
            states: Tensor = self.whole.base_model(**layout, use_cache=False).last_hidden_state
        return states.flatten(0, 1)

    def _autocast(self, *, enabled: bool = True) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled and self._precision == "bfloat16")

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        logits = self.whole(input_ids=ids, use_cache=False).logits
        states = self.whole.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found = self._output(states)[:, self._scored].reshape(logits.shape)
        if not torch.allclose(logits, found, atol=HEAD_TOLERANCE):
            raise ConfigError(
                f"model {self._folder}: {type(self.whole).__name__} changes its output around the last layer, in a way "
                f"that the trainer does not compute; {OTHERS}"
            )

    def _output(self, states: Tensor) -> Tensor:
        """Maps hidden states to the output of the model's own forward."""
        output: Tensor = self.head(states)
        return output


class CausalModel(LoadedModel):
    """A language model. vocabulary: 1 + the largest id of the tokenizer; head rows beyond it get probability 0.
    float32_head: the head computes in float32 even where the body computes in bfloat16."""

    def __init__(
        self, whole: Any, folder: Path, precision: Precision, *, float32_head: bool, unfilled: Unfilled | None = None
    ) -> None:
        head = whole.get_output_embeddings()
        self._scaling = OutputScaling.of(whole.config)
        super().__init__(whole, head, AutoConfig.from_pretrained(folder), folder, precision, unfilled=unfilled)
        self.vocabulary = min(vocabulary_size(self.tokenizer), head.weight.shape[0])
        self.float32_head = float32_head

    def _has_known_output(self) -> bool:
        return self.whole.config.model_type in TRAINED  # Tests hold it of these.

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [tokens, width] to logits, float32 [tokens, vocabulary]."""
        with self._autocast(enabled=not self.float32_head):
            logits: Tensor = self.head(hidden.float() if self.float32_head else hidden)
        return self._scaling.apply(logits[..., : self.vocabulary].float())

    def _output(self, states: Tensor) -> Tensor:
        return self._scaling.apply(self.head(states))


class ValueModel(LoadedModel):
    """A model with one output number per token: a critic or a reward model."""

    def __init__(
        self,
        whole: Any,
        folder: Path,
        precision: Precision,
        scored: slice = slice(None),
        unfilled: Unfilled | None = None,
    ) -> None:
        config = AutoConfig.from_pretrained(folder, num_labels=1)
        config.architectures = [type(whole).__name__]
        head = whole.score if hasattr(whole, "score") else whole.classifier
        super().__init__(whole, head, config, folder, precision, scored, unfilled)

    def values(self, rows: ModelRows) -> Tensor:
        """Returns the value of the state before each response token, float32 [tokens]. The head computes in float32,
        because bfloat16 would round close scores to the same number."""

        values: Tensor = self.in_pass(lambda: self.head(self.states(rows).float()))
        return values.squeeze(-1)

    def idle_pass(self, *, backward: bool) -> None:
        """Computes one value that counts for nothing, while other ranks have rows: ranks that share out the weights
        gather them together in every pass."""
        if self._root is None:
            return
        with torch.set_grad_enabled(backward):
            values = self.values(lay_out_rows([IDLE], self.device))
        if backward:
            torch.autograd.backward(0.0 * values.sum())

    def scores(self, rows: Sequence[Ids]) -> Tensor:
        """Returns the score of each row at its last token, float32 [rows]; the row length tells which token is last."""
        # The state before a further token is that of the last one.
        return self.values(lay_out_rows([SampleRow(row, IDLE.response_ids) for row in rows], self.device))


def load_causal_model(
    folder: Path,
    device: str,
    precision: Precision = "float32",
    *,
    float32_head: bool = False,
    in_parts: bool = False,
    replay: bool = False,
) -> CausalModel:
    """Loads a language model in float32 and without dropout. in_parts: it has no memory until `share_out` gives this
    rank its parts, unless its files must be loaded whole. replay: routers choose the experts that rows have recorded.
    Raises ConfigError as CausalModel and RouterReplay do, and JournalError when a checkpoint is damaged."""
    options = _options(folder)
    made = _unfilled(folder, device, AutoModelForCausalLM, options) if in_parts or is_in_parts(folder) else ""
    whole, unfilled = (load_pretrained(folder, **options).to(device), None) if isinstance(made, str) else made
    model = CausalModel(whole, folder, precision, float32_head=float32_head, unfilled=unfilled)
    model.loaded_whole = made if isinstance(made, str) else ""
    model.replay = RouterReplay(whole, RecordShape.of(whole.config.to_dict())) if replay else None
    return model


def _unfilled(folder: Path, device: str, kind: Any, options: dict[str, Any]) -> tuple[Any, Unfilled] | str:
    """Returns a model without memory and its weights, in parts of a checkpoint or in files that are read by slices; or
    the reason why transformers has to load it."""
    refuse_damaged(folder)
    whole = unfilled_model(folder, kind, **options)
    if is_in_parts(folder):
        return whole, Unfilled(device, stored_tensors(folder.parent, "weights"))
    heads = frozenset(name for name, _ in whole.named_parameters() if name.split(".")[0] in HEADS)
    try:
        found = sliced_weights(folder, whole, missing=heads)
    except NotInSlices as error:
        return str(error)
    return whole, Unfilled(device, found, heads - found.keys())


def load_value_model(
    folder: Path, device: str, precision: Precision = "float32", *, in_parts: bool = False
) -> ValueModel:
    """Loads a critic with transformers' token classification head and one label. Head parameters that the folder lacks
    are set to 0, so that a new head outputs 0 until it is trained. in_parts: see `load_causal_model`. Raises
    ConfigError."""
    options = _options(folder, num_labels=1)
    kind = AutoModelForTokenClassification
    made = _unfilled(folder, device, kind, options) if in_parts or is_in_parts(folder) else ""
    if not isinstance(made, str):
        return ValueModel(made[0], folder, precision, unfilled=made[1])
    whole, missing = load_pretrained_classifier(folder, kind, "critic", **options)
    for name in missing:
        nn.init.zeros_(whole.get_parameter(name))
    model = ValueModel(whole.to(device), folder, precision)
    model.loaded_whole = made
    return model


def load_score_model(
    folder: Path, device: str, precision: Precision = "float32", *, in_parts: bool = False
) -> ValueModel:
    """Loads a frozen reward model without dropout, which scores the last token of a row, by transformers' sequence
    classification head with one label or a critic's head. in_parts: see `load_causal_model`. Raises ConfigError when
    the folder holds no such head."""
    architectures = AutoConfig.from_pretrained(folder).architectures or []
    token_head = any(name.endswith("ForTokenClassification") for name in architectures)
    kind = AutoModelForTokenClassification if token_head else AutoModelForSequenceClassification
    options = _options(folder, num_labels=1)
    made = _unfilled(folder, device, kind, options) if in_parts else ""
    if isinstance(made, str):
        whole, missing = load_pretrained_classifier(folder, kind, "reward model", **options)
        unfilled = None
    else:
        whole, unfilled = made
        missing = sorted(unfilled.zeros)
    if missing:
        raise ConfigError(
            f"model {folder} cannot be a reward model: it holds no {', '.join(missing)}, so its scores would be noise; "
            "take a folder that AutoModelForSequenceClassification with num_labels=1 was saved to after training"
        )
    if not hasattr(whole, "score"):
        raise ConfigError(
            f"model {folder} cannot be a reward model: {type(whole).__name__} does not score the state of the last "
            f"token; {OTHERS}"
        )
    whole.config.pad_token_id = None  # Its own forward only ever gets one row, which has no padding.
    whole.eval().requires_grad_(False)
    scored = slice(None) if token_head else slice(-1, None)
    model = ValueModel(whole if unfilled else whole.to(device), folder, precision, scored, unfilled)
    model.loaded_whole = made if isinstance(made, str) else ""
    return model


def refuse_another_tokenizer(model: LoadedModel, policy: Path, key: str) -> None:
    """Raises ConfigError unless `model` has the vocabulary of the policy; `key` names the model in the config."""
    if model.tokenizer.get_vocab() != AutoTokenizer.from_pretrained(policy).get_vocab():
        raise ConfigError(f"{key}: {ANOTHER_TOKENIZER}")


def _options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Returns the options of loading, without dropout: the ratio of an unchanged policy would differ from 1 with it."""
    config = AutoConfig.from_pretrained(folder, **changes)
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return {"config": config, "dtype": torch.float32}


# Log-probs of sampled tokens; trainer and reference compute them only here.


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
    batches = [lay_out_rows(rows, model.device, model.packs) for rows in parts]
    found = [torch.zeros(len(batch.targets), device=model.device) for batch in batches]

    def keep(number: int, states: Tensor) -> Tensor:
        found[number], _ = head_logprobs(model, states, batches[number], chunk)
        return torch.zeros(1, device=model.device)

    run_stages(model, batches, keep, backward=False)
    rows = [row for part in parts for row in part]
    logprobs = model.pipeline.from_last(torch.cat([torch.zeros(0, device=model.device), *found]))
    return split_by_row(logprobs, rows) if rows else []


def idle_pass(model: CausalModel, *, backward: bool) -> None:
    """Computes one token that counts for nothing, while other ranks have rows: ranks that share out the weights gather
    them together in every pass."""
    with torch.set_grad_enabled(backward):
        logprobs, _ = token_logprobs(model, lay_out_rows([IDLE], model.device), 1)
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

    run_stages(model, [lay_out_rows([SampleRow(prompt, prompt[:1])], model.device)], keep, backward=False)
    return model.pipeline.from_last(found)


@torch.no_grad()
def frozen_logprobs(
    model: CausalModel, rows: Sequence[ModelRow], chunk: int, budget: float = math.inf, *, replayed: bool = True
) -> list[NDArray[np.float32]]:
    """Computes the log-probs [tokens] of each row, without gradient, together, so that their bits depend on all
    these rows. budget, replayed: see `lay_out_rows`."""
    laid_out = lay_out_rows(rows, model.device, model.packs, budget, replayed=replayed)
    return split_by_row(token_logprobs(model, laid_out, chunk)[0], rows)


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
