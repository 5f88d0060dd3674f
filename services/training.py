"""Trains the policy and publishes each new version into the weight arena."""

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.engines.training.interface import StepOutcome, TrainingEngine, TrainRow
from asyncrl.engines.training.state import digests
from asyncrl.engines.training.torch import TorchTraining
from asyncrl.errors import ConfigError, DeadlineExceeded, Refused
from asyncrl.protocols.batch import Batch, BatchRef, Cuts
from asyncrl.protocols.chain import GENESIS, chain
from asyncrl.protocols.contracts import Training
from asyncrl.protocols.messages import Checkpointed, Published, StepReport, TrainedSample
from asyncrl.rows_ahead import RowsAhead
from asyncrl.service import Service, WorkerContext
from asyncrl.weights.arena import Writer, open_writer

PLAIN = ("prompt_ids", "response_ids", "logprobs", "versions")
REFERENCE = "reference_logprobs"


@dataclass(frozen=True, slots=True)
class Iteration:
    """A step whose batch was read. work: the engine's part, which no cancelled call interrupts."""

    cuts: Cuts
    digest: str
    work: "asyncio.Task[StepOutcome]"


@dataclass(frozen=True, slots=True)
class Done:
    """The last step that led to a new version."""

    digest: str
    report: StepReport


class TrainingService(Service, Training):
    """One rank, one engine. `step` is a compare-and-set on (epoch, version).

    Once the engine has begun on a batch it is finished whatever becomes of the call: half a step would be weights
    of no version. A repeated call with the same batch waits for it, or gets the stored report.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: TrainingEngine
        self._writer: Writer | None = None
        self._published: Published
        self._version, self._chain = 0, GENESIS
        self._iteration: Iteration | None = None
        self._last: Done | None = None
        self._turn = asyncio.Lock()
        with_reference = context.config.algorithm.kl > 0
        self._ahead = RowsAhead(context.reader, [*PLAIN, REFERENCE] if with_reference else PLAIN)
        self._leases_changed = asyncio.Event()

    async def start(self) -> None:
        """Load the model, or the checkpoint the run resumes from, and publish its version.

        Raises:
            ConfigError: the model or layout is none that the engine trains.
            ArenaFull: there is no room for two versions of the weights.
        """
        if self.context.layout.size > 1:
            raise ConfigError(
                f"training.layout_dp = {self.context.config.training.layout_dp}: the trainer runs on one rank so far; "
                "write 1"
            )
        await self.context.compute.run(self._load)
        self._published = await self.context.compute.run(self._write, self._version)

    async def stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        await super().stop()

    # ---- endpoints ---------------------------------------------------------------------------------------

    async def step(self, cuts: Cuts) -> StepReport:
        digest = batch_digest(cuts)
        async with self._turn:
            stored = self._stored(cuts, digest)
            if stored is not None:
                return stored
            self._refuse_elsewhere(cuts, digest)
            if self._iteration is None:
                rows = await self._read(cuts.batch)
                self._iteration = self._begin(cuts, digest, rows)
            return await self._complete(self._iteration)

    async def foresee(self, samples: BatchRef) -> list[bool]:
        return await self._ahead.foresee(samples)

    async def published(self) -> Published:
        return self._published

    async def using(self, reader: str, version: int) -> None:
        self._writing.leases.using(reader, version)
        self._leases_changed.set()

    async def detached(self, reader: str) -> None:
        self._writing.leases.detach(reader)
        self._leases_changed.set()

    async def checkpoint(self, directory: str, epoch: int, version: int) -> Checkpointed:
        async with self._turn:
            if (epoch, version) != self._at or self._iteration is not None:
                raise Refused(
                    f"a checkpoint of {_named((epoch, version))} was asked for; the trainer is at {self._state}"
                )
            files = await self.context.compute.run(self._save, Path(directory))
            return Checkpointed(version, self._chain.hex(), files)

    # ---- a step ------------------------------------------------------------------------------------------

    def _stored(self, cuts: Cuts, digest: str) -> StepReport | None:
        """The report of this very step, when it is the one that led here."""
        repeated = (cuts.epoch, cuts.version + 1) == self._at and self._last is not None
        return self._last.report if repeated and self._last is not None and self._last.digest == digest else None

    def _refuse_elsewhere(self, cuts: Cuts, digest: str) -> None:
        if (cuts.epoch, cuts.version) != self._at:
            raise Refused(
                f"a step from {_named((cuts.epoch, cuts.version))} was asked for; the trainer is at {self._state}"
            )
        if self._iteration is not None and self._iteration.digest != digest:
            raise Refused(
                f"a step from {self._state} was asked for with batch {digest[:16]}, but batch "
                f"{self._iteration.digest[:16]} is being trained from there"
            )

    async def _read(self, batch: BatchRef) -> list[TrainRow]:
        """Raises LostRows, with nothing changed, when rows are gone."""
        rows = train_rows(batch, await self._ahead.read(batch), self.context.config.generation.temperature)
        for row in batch:
            self.context.tracer.flow_end(f"sample {row.group}.{row.member}.{row.attempt}")
        return rows

    def _begin(self, cuts: Cuts, digest: str, rows: list[TrainRow]) -> Iteration:
        """The engine's work as a task of the worker: what it raises ends the worker, whose weights are unknown then."""
        work = self.context.tasks.create_task(self._run_engine(cuts, rows), name=f"step from version {cuts.version}")
        return Iteration(cuts, digest, work)

    async def _run_engine(self, cuts: Cuts, rows: list[TrainRow]) -> StepOutcome:
        """A micro-batch at a time, so that other work of this thread gets its turn between them."""
        run = self._engine.begin(rows, cuts.epoch, cuts.version)
        while await self.context.compute.run(run.advance):
            self.counters["micro_batches"] = self.counters.get("micro_batches", 0) + 1
        return run.outcome

    async def _complete(self, iteration: Iteration) -> StepReport:
        outcome = await asyncio.shield(iteration.work)
        if outcome.skipped:
            self._iteration = None
            self.context.log.warning("step skipped", reason=outcome.skipped, samples=outcome.culprits)
            return self._report(outcome, None)
        version = self._version + 1
        await self._slot_free(version)
        self._published = await self.context.compute.run(self._write, version)
        self._version, self._chain = version, chain(self._chain, [sample.key for sample in outcome.samples])
        report = self._report(outcome, self._published)
        self._iteration, self._last = None, Done(iteration.digest, report)
        return report

    async def _slot_free(self, version: int) -> None:
        """Until no reader reads what `version` will overwrite; from then on none may. A reader that does not let go
        within `staleness.publish_deadline` is killed by the controller; it gets as long again to be gone."""
        deadline = 2 * self.context.config.staleness.publish_deadline
        try:
            with self.context.clock.state("sync"):
                async with asyncio.timeout(deadline):
                    while self._writing.leases.holders(version):
                        self._leases_changed.clear()
                        await self._leases_changed.wait()
                    self._writing.leases.begin(version)
        except TimeoutError:
            holders = ", ".join(self._writing.leases.holders(version))
            raise DeadlineExceeded(
                f"weights of version {version} could not be written within {deadline:g} s: {holders} still read the "
                f"slot; raise staleness.publish_deadline if they are only slow"
            ) from None

    def _report(self, outcome: StepOutcome, published: Published | None) -> StepReport:
        samples = tuple(TrainedSample(*s.key, s.trained, s.masked, s.reason) for s in outcome.samples)
        epoch, version = self._at
        return StepReport(
            epoch, version, outcome.updates, outcome.skipped, self._chain.hex(), outcome.metrics, samples, published
        )

    # ---- state -------------------------------------------------------------------------------------------

    @property
    def _at(self) -> tuple[int, int]:
        return (self.context.epoch, self._version)

    @property
    def _state(self) -> str:
        return _named(self._at)

    @property
    def _writing(self) -> Writer:
        assert self._writer is not None, "calls come after start"
        return self._writer

    def _load(self) -> None:
        """On the compute thread."""
        self._engine, extra = self.open_engine()
        self._version, self._chain = extra.get("version", 0), bytes.fromhex(extra.get("chain", GENESIS.hex()))
        wire = self.context.config.fleet.wire
        self._writer = open_writer(self.context.weights_arena, self._engine.weights_spec, wire)

    def open_engine(self) -> tuple[TrainingEngine, dict[str, Any]]:
        """The engine and what was saved beside its state; of a first start: nothing."""
        context = self.context
        if context.checkpoint_dir is None:
            return TorchTraining(context.config, context.model_dir), {}
        return TorchTraining.resume(context.config, context.checkpoint_dir)

    def _write(self, version: int) -> Published:
        """On the compute thread."""
        with self.context.clock.state("sync"):
            return self._writing.write(self.context.epoch, version, self._engine.named_tensors())

    def _save(self, directory: Path) -> dict[str, str]:
        """On the compute thread."""
        directory.mkdir(parents=True, exist_ok=True)
        extra: dict[str, Any] = {"version": self._version, "epoch": self.context.epoch, "chain": self._chain.hex()}
        self._engine.save(directory, extra)
        return digests(directory)


def train_rows(refs: BatchRef, batch: Batch, temperature: float) -> list[TrainRow]:
    """The samples of these references, whose rows these are."""
    prompts, responses, logprobs, versions = (batch[name] for name in PLAIN)
    references = batch.columns.get(REFERENCE)
    rows = []
    for index, ref in enumerate(refs):
        assert ref.advantage is not None, f"sample {ref.key} reached the trainer without an advantage"
        rows.append(
            TrainRow(
                group=ref.group,
                member=ref.member,
                attempt=ref.attempt,
                epoch=ref.epoch,
                prompt_ids=prompts[index].astype(np.int64),
                response_ids=responses[index].astype(np.int64),
                logprobs=logprobs[index],
                versions=versions[index].astype(np.int64),
                advantage=ref.advantage,
                temperature=temperature,
                truncated=ref.finish == "length",
                reference_logprobs=references[index] if references is not None else None,
            )
        )
    return rows


def batch_digest(cuts: Cuts) -> str:
    """sha256 hex over which samples a step trains, with which advantages."""
    facts = [(row.group, row.member, row.attempt, row.advantage) for row in cuts.batch]
    return hashlib.sha256(repr((cuts.epoch, cuts.version, facts)).encode()).hexdigest()


def _named(state: tuple[int, int]) -> str:
    return f"version {state[1]} of epoch {state[0]}"
