"""Shrinks a batch to the smallest set of groups with which its step still shows what is wrong.

Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", TSE 2002,
section 3: ddmin).
"""

import operator
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from asyncrl.deploy.commands.replayed_service import RecordedWorker
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome, run_step
from asyncrl.errors import ConfigError
from asyncrl.fleet.worker.worker_spec import WorkerSpec

OPERATORS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
CONDITION = re.compile(r"\s*([\w/.@-]+)\s*(>=|<=|>|<)\s*(-?[\d.]+(?:e-?\d+)?)\s*")
SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Condition:
    """Tells whether a step shows what is looked for: a metric beyond a bound, or "skipped": the trainer took no step,
    because loss or gradient was not finite."""

    text: str = SKIPPED

    def __post_init__(self) -> None:
        if self.text != SKIPPED and CONDITION.fullmatch(self.text) is None:
            raise ConfigError(f"--when: {self.text!r} is neither {SKIPPED!r} nor METRIC > NUMBER")

    def holds(self, outcome: StepOutcome) -> bool:
        """Raises ConfigError for a metric that the step does not have."""
        if self.text == SKIPPED:
            return bool(outcome.skipped)
        found = CONDITION.fullmatch(self.text)
        assert found is not None
        name, sign, bound = found.groups()
        if name not in outcome.metrics:
            raise ConfigError(f"--when: the step has no metric {name!r}; it has {', '.join(sorted(outcome.metrics))}")
        return bool(OPERATORS[sign](outcome.metrics[name], float(bound)))


def smallest(groups: Sequence[int], shows: Callable[[Sequence[int]], bool]) -> list[int]:
    """Returns a set of groups that shows it and from which none can be left out. shows: tries some groups, and is
    true of all."""
    kept = list(groups)
    parts = 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        rests = [[group for group in kept if group not in chunk] for chunk in chunks]
        found = next((each for each in (*chunks, *rests) if 0 < len(each) < len(kept) and shows(each)), None)
        if found is not None:
            parts = 2 if found in chunks else max(parts - 1, 2)
            kept = found
        elif parts >= len(kept):
            return kept
        else:
            parts = min(len(kept), 2 * parts)
    return kept


class StepTrials:
    """Repeats one step with some of its groups, each time from the same state."""

    def __init__(self, trainer: PolicyTrainer, spec: WorkerSpec) -> None:
        logging.disable_progress_bar()  # transformers shows one for each file of a model that it writes.
        self._spec = spec
        self._state = Path(tempfile.mkdtemp(prefix="asyncrl-step-"))
        trainer.save(self._state, {})

    def close(self) -> None:
        shutil.rmtree(self._state)

    def outcome(self, rows: Sequence[TrainRow], incarnation: int, version: int) -> StepOutcome:
        return run_step(_trainer(self._spec, self._state), rows, incarnation, version)


def trainer_at(worker: RecordedWorker, version: int) -> PolicyTrainer:
    """Returns the trainer before the step from `version`, by training the recorded steps before it."""
    begin, checkpoint = worker.start(version)
    trainer = _trainer(worker.spec, checkpoint)
    for earlier in worker.versions:
        if begin <= earlier < version:
            cuts, rows = worker.batch(earlier)
            run_step(trainer, rows, cuts.incarnation, earlier)
    return trainer


def _trainer(spec: WorkerSpec, checkpoint: Path | None) -> PolicyTrainer:
    facts = spec.facts
    config = spec.facts.config
    texts = Path(spec.options["pretrain"]) if config.algorithm.pretrain_coefficient > 0 else None
    if checkpoint is None:
        return PolicyTrainer(config, facts.model_dir, None, texts)
    return PolicyTrainer.resume(config, checkpoint, None, texts, facts.model_dir)[0]
