"""The trainer of the policy and its step: any causal language model of transformers, one device per rank, which learns
from samples and beside them from texts of `task.pretrain`."""

import json
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import canary_distance, canary_of, probe_tokens
from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.engines.models.lora import attach, base_model, load_adapters, published_spec, published_tensors
from asyncrl.engines.models.model_families import refuse_rotation_by_longest_row
from asyncrl.engines.models.model_folder import context_of, longest_row, weights_digest
from asyncrl.engines.ranks.pipeline import PipelineRank
from asyncrl.engines.ranks.rank_mesh import RankMesh, own_device
from asyncrl.engines.training.micro_batches import (
    MaskedRow,
    MicroBatch,
    lay_out_rows,
    mask_metrics,
    micro_batch,
    micro_batches,
)
from asyncrl.engines.training.models_with_heads import (
    CausalModel,
    frozen_logprobs,
    frozen_stage_logprobs,
    head_logprobs,
    idle_pass,
    load_causal_model,
    logprobs_after,
    run_stages,
    token_logprobs,
)
from asyncrl.engines.training.policy_loss import (
    LossTerms,
    PolicyTotals,
    broken_rows,
    mean_cost,
    policy_loss_terms,
    second_moment_of,
    set_token_advantages,
)
from asyncrl.engines.training.train_rows import SampleRow, TrainRow, padded_sizes
from asyncrl.engines.training.trainer_checkpoint import (
    MODEL,
    AdaptedModel,
    StateCopy,
    read_state,
    refuse_changed_base,
)
from asyncrl.engines.training.training_step import Backward, Trainer, TrainingStep
from asyncrl.engines.training.zero_optimizer import hold_model, open_optimizer
from asyncrl.errors import TaskError
from asyncrl.lanes.weights.slot_memory import DTYPES, WeightsSpec, whole_tensor
from asyncrl.objectives.advantages import Multiplier
from asyncrl.objectives.kl import KlCoefficient
from asyncrl.objectives.losses import row_weights
from asyncrl.protocols.messages import Canary
from asyncrl.tasks.prompt_rows import drawn_row

# The texts of the pretraining loss, which the policy must not forget: reads them and chooses those of each update.


def load_pretraining(path: Path, config: Config, model_config: Any, tokenizer: Any) -> list[SampleRow]:
    """Reads texts from JSON lines and cuts each to the longest row of the run and to the model's context. Prompts are
    given, responses learnt. Raises TaskError when a prompt cannot be rendered or leaves no room for its answer, or a
    text has only one token."""
    longest = longest_row(config, context_of(model_config.to_dict()))
    chats = TokenizerWithStops(tokenizer, (), config.task.template_arguments)
    with path.open(encoding="utf-8") as lines:
        return [
            _tokenize(json.loads(line), tokenizer, chats, longest, f"task.pretrain, row {row + 1}")
            for row, line in enumerate(lines)
        ]


def _tokenize(row: dict[str, Any], tokenizer: Any, chats: TokenizerWithStops, longest: int, where: str) -> SampleRow:
    """Tokenizes a text, of which all tokens but the first are learnt, or a prompt with an answer, which is learnt. An
    end-of-sequence token follows, unless the row is cut before it."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if "text" in row:
        ids = np.array([*tokenizer(row["text"])["input_ids"], *end], np.int64)
        given = 1
    else:
        prompt = chats.prompt_ids(row["prompt"])
        answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        ids = np.array([*prompt, *answer, *end], np.int64)
        given = len(prompt)
    if given == 0 or given >= min(len(ids), longest):
        raise TaskError(f"{where}: {given} of its {len(ids)} tokens (at most {longest}) are given, none is learnt")
    return SampleRow(ids[:given], ids[given:longest])


def texts_of(texts: Sequence[SampleRow], config: Config, version: int, update: int) -> list[SampleRow]:
    """Returns the texts of one update of the step from `version`, of `task.pretrain_per_step` a step; every text comes
    once before one repeats. A pure function, so that all ranks and a resumed run choose the same texts."""
    count = config.task.pretrain_per_step
    updates = config.training.updates
    own = range(update * count // updates, (update + 1) * count // updates)
    return [texts[drawn_row(config.seed, version * count + place, len(texts))] for place in own]


RowLogprobs: TypeAlias = list[tuple[MaskedRow, NDArray[np.float32]]]


class PolicyTrainer(Trainer):
    """Trains float32 master weights. On CPU with one thread the same rows give the same bits.

    kl, multiplier: coefficient of the KL and price of costs, which may change after a step. texts: learnt beside the
    samples. multiplier and texts are None where the algorithm has none.
    """

    model: CausalModel

    def __init__(
        self,
        config: Config,
        folder: Path,
        mesh: RankMesh | None = None,
        texts: Path | None = None,
        adapters: Path | None = None,
    ) -> None:
        """Loads model, adapters and pretraining texts, if any. Raises TaskError when a text cannot be used, and
        ConfigError when `model.lora` does not fit the model."""
        settings = config.training
        algorithm = config.algorithm
        cost = config.cost
        self.config = config
        self.mesh = mesh or RankMesh()
        self._folder = folder
        refuse_rotation_by_longest_row(folder, config)
        device = own_device(settings.device, self.mesh.rank, self.mesh.size)
        options = {"float32_head": config.model.float32_head, "in_parts": self.mesh.is_parted}
        options["replay"] = settings.router_replay
        self.model = load_causal_model(folder, device, settings.precision, **options)
        if config.model.lora is not None:
            digest = weights_digest(folder) if self.mesh.rank == 0 else ""
            self._adapted = AdaptedModel(config.model.lora, folder, digest)
            attach(self.model.whole, config.model.lora, config.seed)
            self.model.is_random = config.model.lora.dropout > 0
        if adapters is not None:
            load_adapters(adapters, self.model.whole)
        self._spec = published_spec(self.model.whole, config.model.dtype)
        self.model.share_out(self.mesh)
        self.optimizer = open_optimizer(self.model, settings, config.steps, self.mesh)
        self._held = hold_model(self.model.whole, self.model.stage_weights, self.mesh)
        self.kl = KlCoefficient(algorithm.kl, algorithm.kl_target)
        self.multiplier: Multiplier | None = None
        if algorithm.constraint != "none":
            assert cost.limit is not None, "the config requires a limit with a constraint"
            self.multiplier = Multiplier(cost.multiplier, cost.multiplier_rate, cost.limit, cost.multiplier_max)
        model = self.model.source_config
        tokenizer = self.model.tokenizer
        self.texts = None if texts is None else load_pretraining(texts, config, model, tokenizer)
        self._probe = probe_tokens(tokenizer, model, longest_row(config))

    @classmethod
    def resume(
        cls,
        config: Config,
        directory: Path,
        mesh: RankMesh | None = None,
        texts: Path | None = None,
        base: Path | None = None,
    ) -> tuple["PolicyTrainer", dict[str, Any]]:
        """Restores the trainer that was copied and written to `directory`, bit for bit; returns its `extra` with it.

        base: the model folder that a run with `model.lora` began with. Raises WeightsError when it holds another model
        by now, because the adapters mean nothing there.
        """
        folder = directory / MODEL
        if config.model.lora is None:
            trainer = cls(config, folder, mesh, texts)
        else:
            assert base is not None, "adapters are restored on their base model"
            trainer = cls(config, base, mesh, texts, folder)
        state = read_state(directory, trainer.optimizer, trainer.mesh)
        if trainer._adapted is not None:
            canary = Canary(*map(tuple, state["canary"]))
            found = logprobs_after(trainer.model, np.array(canary.prompt)).numpy(force=True)
            refuse_changed_base(folder, trainer._folder, canary_distance(canary, found))
        if trainer.kl.target is not None:
            trainer.kl.value = state["kl"]
        if trainer.multiplier is not None and "multiplier" in state:
            trainer.multiplier.value = state["multiplier"]
        return trainer, state["extra"]

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kl": self.kl.value}
        if self.multiplier is not None:
            facts["multiplier"] = self.multiplier.value
        if self._adapted is not None:
            facts["canary"] = list(astuple(self.canary()))
        return facts

    def copy_beside_pass(self, extra: dict[str, Any]) -> StateCopy | None:
        """Copies the state as `copy_state` does, but alone, on another thread than that of a step that takes no update:
        its passes change no weights. None: passes move weights (FSDP, ZeRO), or the copy needs one (adapters)."""
        if self.mesh.sharding is not None or self.mesh.zero or self._adapted is not None:
            return None
        self.mesh = self.mesh.without_exchange()
        self._held = replace(self._held, mesh=self.mesh)
        if self.model.device.type != "cuda":
            return self.copy_state(extra)
        stream = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # In the stream of all threads the copy would wait for the pass.
            return self.copy_state(extra)

    def begin(self, rows: Sequence[TrainRow], incarnation: int, version: int) -> "PolicyStep":
        return PolicyStep(self, rows, incarnation, version)

    @property
    def weights_spec(self) -> WeightsSpec:
        """Returns names, shapes and dtype of the published weights."""
        return self._spec

    def named_tensors(self) -> dict[str, Tensor]:
        """Returns the float32 master weights, tied ones under every name; with `model.lora` only the adapters. The next
        step changes them in place. Sharded ones, and those of other pipeline stages, are gathered by `whole_tensor`, on
        all ranks in the order of the specification."""
        return self._held.published(published_tensors(self.model.whole))

    def publish_parts(self) -> None:
        """Takes part in what rank 0 does when it publishes weights that ranks hold parts of: each is gathered, then all
        compute the canary."""
        self.gather_published()
        self.canary()

    def gather_published(self) -> None:
        """Gathers each tensor that rank 0 publishes, and keeps none."""
        tensors = self.named_tensors()
        for tensor in self._spec.tensors:
            whole_tensor(tensors[tensor.name], DTYPES[self._spec.dtype])

    def canary(self) -> Canary:
        """Returns the canary of the current weights, which generation engines compare themselves with. Ranks that share
        out the weights compute it together."""
        return canary_of(self._probe, logprobs_after(self.model, self._probe))


class PolicyStep(TrainingStep):
    """Trains the policy on one batch. Samples of an update that is not finite do not count as trained.

    The pretraining loss is -sum of log pi(token | earlier tokens) / tokens over the learnt tokens of the texts of an
    update, added with `algorithm.pretrain_coefficient`. Sources: PPO-ptx (arXiv 2203.02155, section 3.5, gamma
    E[log pi(x)]); Safe RLHF (arXiv 2310.12773, appendix B, L^PTX).
    """

    def __init__(self, trainer: PolicyTrainer, rows: Sequence[TrainRow], incarnation: int, version: int) -> None:
        super().__init__(trainer, rows, incarnation, version)
        self._trainer = trainer
        self._version = version
        self._algorithm = trainer.config.algorithm
        self._cost = 0.0
        self._totals = PolicyTotals(trainer.model.device)
        self._update_totals = self._totals
        self._pretrain_loss = 0.0  # of this rank's texts of the running update
        self._pretrain_losses: list[float] = []

    def _prepare(self) -> Iterator[bool]:
        algorithm = self._algorithm
        kl = self._trainer.kl.value
        multiplier = self._trainer.multiplier
        if multiplier is not None:
            self._cost = mean_cost(self._rows, self._mesh.rows)
        if self._algorithm.kl > 0 and not self._config.reference_by_service:
            for item, logprobs in (yield from self._logprobs(self._rows, of_base=True)):
                item.row = replace(item.row, reference_logprobs=logprobs)
        set_token_advantages(self._rows, algorithm, kl, self._mesh.rows, multiplier)
        needed = algorithm.old_logprobs != "engine" or algorithm.rejection != "none"
        if needed and self._config.training.updates > 1:  # The first update alone would find them unchanged.
            for item, logprobs in (yield from self._logprobs(self._rows)):
                item.proximal = logprobs

    def _logprobs(self, rows: Sequence[MaskedRow], *, of_base: bool = False) -> Generator[bool, None, RowLogprobs]:
        """Computes the trainer's log-probs of every row with a live token. of_base: those of the model without its
        adapters, of all rows, because advantages with a KL in the reward are over all rows."""
        model = self._trainer.model
        chunk = self._config.training.logits_chunk
        found: RowLogprobs = []
        parts = list(self._micro_batches([item for item in rows if item.live_tokens or of_base]))
        if model.pipeline is not None:
            with base_model(model.whole) if of_base else nullcontext(), self._lane("forward"):
                logprobs = frozen_stage_logprobs(model, [[item.row for item in items] for items in parts], chunk)
            found = list(zip([item for items in parts for item in items], logprobs, strict=True))
            parts = []
            yield True
        for items in parts:
            if not items:
                idle_pass(model, backward=False)
                yield True
                continue
            own = [item.row for item in items]
            budget = self._pass_budget
            with base_model(model.whole) if of_base else nullcontext(), self._lane("forward"):
                logprobs = frozen_logprobs(model, own, chunk, budget, replayed=not of_base)
            found += zip(items, logprobs, strict=True)
            yield True
        return found

    def _backward(self, rows: Sequence[MaskedRow], number: int, tokens: int, samples: int) -> Backward:
        lengths = torch.tensor([len(item.live) for item in rows])
        divisor = self._algorithm.divisor or self._config.response_tokens
        weights = row_weights(self._algorithm.aggregation, lengths, tokens, samples, divisor)
        for item, weight in zip(rows, weights.tolist(), strict=True):
            item.weight = weight
        self._update_totals = PolicyTotals(self._trainer.model.device)
        second_moment = yield from self._second_moment(rows)
        finite = True
        if self._trainer.model.pipeline is not None:
            finite = self._stage_passes(self._trainer.model.pipeline, list(self._micro_batches(rows)), second_moment)
            yield True
        else:
            for items in self._micro_batches(rows):
                finite = self._policy_pass(items, second_moment) and finite
                yield True
        yield from self._pretrain(number)
        return finite

    def _second_moment(self, rows: Sequence[MaskedRow]) -> Generator[bool, None, float]:
        """Computes the bound of the squared log ratios of this update; infinity for losses other than m2po."""
        if self._algorithm.loss != "m2po":
            return math.inf
        return second_moment_of((yield from self._logprobs(rows)), self._algorithm, self._mesh.rows)

    def _policy_pass(self, rows: Sequence[MaskedRow], second_moment: float) -> bool:
        """Runs forward and backward of a micro-batch; returns False if its loss is not finite."""
        model = self._trainer.model
        training = self._config.training
        if not rows:
            idle_pass(model, backward=True)
            return True
        batch = micro_batch(rows, model.device, model.packs, self._pass_budget)
        chunk = training.logits_chunk
        bonus = self._algorithm.entropy_bonus > 0
        with self._lane("forward"):
            logprobs, entropy = token_logprobs(model, batch.model_rows, chunk, entropy_gradient=bonus)
        terms = self._terms(batch, logprobs, entropy, second_moment)
        with self._lane("backward"):  # Also of a loss that is not finite: ranks with shards of the weights take part.
            model.backward(terms.loss)
        return self._account_for(rows, batch, logprobs, entropy, terms)

    def _stage_passes(self, pipeline: PipelineRank, parts: Sequence[list[MaskedRow]], second_moment: float) -> bool:
        """Runs forward and backward of all micro-batches of an update through the stages of a pipeline. The last one
        computes the losses, and what became of each row is told to the others. Returns False at the last one if a loss
        is not finite."""
        model = self._trainer.model
        chunk = self._config.training.logits_chunk
        bonus = self._algorithm.entropy_bonus > 0
        batches = [micro_batch(rows, model.device, model.packs) for rows in parts]
        finite = True

        def ending(number: int, states: Tensor) -> Tensor:
            nonlocal finite
            batch = batches[number]
            logprobs, entropy = head_logprobs(model, states, batch.model_rows, chunk, entropy_gradient=bonus)
            terms = self._terms(batch, logprobs, entropy, second_moment)
            finite = self._account_for(parts[number], batch, logprobs, entropy, terms) and finite
            return terms.loss

        with self._lane("pipeline"):
            run_stages(model, [batch.model_rows for batch in batches], ending, backward=True)
        rows = [item for items in parts for item in items]
        told = pipeline.from_last(torch.tensor([(item.in_loss, item.rejected) for item in rows]).reshape(-1, 2))
        for item, (in_loss, rejected) in zip(rows, told.tolist(), strict=True):
            item.in_loss = in_loss
            item.rejected = rejected
        return finite

    def _terms(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, second_moment: float) -> LossTerms:
        return policy_loss_terms(self._algorithm, self._trainer.kl.value, second_moment, logprobs, entropy, batch)

    def _account_for(
        self, rows: Sequence[MaskedRow], batch: MicroBatch, logprobs: Tensor, entropy: Tensor, terms: LossTerms
    ) -> bool:
        """Notes what a micro-batch put into the loss; returns False if its loss is not finite."""
        if not math.isfinite(terms.loss.item()):
            self._culprits += [rows[index].row.key for index in broken_rows(terms, batch.ragged)]
            return False
        self._update_totals.add(terms, logprobs, entropy, batch, first=not self._norms)
        for item, rejected in zip(rows, batch.ragged.sum((terms.weight == 0).float()).tolist(), strict=True):
            item.rejected = int(rejected)
            item.in_loss = item.live_tokens - item.rejected
        return True

    def _pretrain(self, number: int) -> Iterator[bool]:
        """Adds the gradient of this rank's share of the texts of an update to that of its samples. A loss that is not
        finite gives a gradient that is not finite, which stops the update on all ranks."""
        self._pretrain_loss = 0.0
        if self._trainer.texts is None:
            return
        model = self._trainer.model
        training = self._config.training
        texts = texts_of(self._trainer.texts, self._config, self._version, number)
        tokens = sum(len(text.response_ids) for text in texts)
        own = texts[self._mesh.rows.rank :: self._mesh.rows.size]
        parts = self._mesh.in_step(micro_batches(padded_sizes(own)[0], training.micro_batch_tokens))
        texts_of_passes = [[own[index] for index in indices] for indices in parts]
        batches = [lay_out_rows(each, model.device) if each else None for each in texts_of_passes]
        if model.pipeline is not None:
            given = [rows for rows in batches if rows is not None]

            def ending(number: int, states: Tensor) -> Tensor:
                logprobs, _ = head_logprobs(model, states, given[number], training.logits_chunk)
                return self._text_loss(logprobs, tokens)

            run_stages(model, given, ending, backward=True)
            yield True
            return
        for rows in batches:
            if rows is None:
                idle_pass(model, backward=True)
            else:
                logprobs, _ = token_logprobs(model, rows, training.logits_chunk)
                model.backward(self._text_loss(logprobs, tokens))
            yield True

    def _text_loss(self, logprobs: Tensor, tokens: int) -> Tensor:
        loss = -logprobs.sum() / tokens
        self._pretrain_loss += loss.item()
        return self._algorithm.pretrain_coefficient * loss

    def _keep_sums(self) -> None:
        self._totals.merge(self._update_totals)
        self._pretrain_losses.append(self._pretrain_loss)

    def _metrics(self, counts: Tensor) -> dict[str, float]:
        trainer = self._trainer
        reference = self._algorithm.kl > 0
        planned = self._config.training.updates
        self._totals.share(self._mesh.stages)
        found = self._totals.metrics(self._mesh.rows, len(self._norms), planned, reference=reference)
        metrics = mask_metrics(counts)
        if trainer.texts is not None:
            losses = torch.tensor(self._pretrain_losses, dtype=torch.float64)
            pretrain_loss = self._mesh.stages.sum(self._mesh.rows.sum(losses)).mean()
        if not self._norms:
            return metrics
        metrics |= {"grad_norm": sum(self._norms) / len(self._norms), "learning_rate": trainer.optimizer.rate, **found}
        if trainer.model.replay is not None:
            metrics["mismatch/other_experts"] = trainer.model.replay.others(self._mesh.rows.sum)
        if reference:
            metrics["policy/kl_coefficient"] = trainer.kl.value
            trainer.kl.update(found["policy/kl_reference"])
        if trainer.texts is not None:
            metrics["policy/pretrain_loss"] = float(pretrain_loss)
        if trainer.multiplier is not None:
            metrics["cost/multiplier"] = trainer.multiplier.value
            trainer.multiplier.update(self._cost)
        return metrics
