"""`asyncrl-bench whatif JOB.toml` predicts the step of a job: the real controller runs on virtual time, on stages with
modelled seconds; a run directory calibrates them."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.bench.overlap.accounting import overlap_of
from asyncrl.deploy.report.run_record import read_run
from asyncrl.deploy.report.worker_trace import read_trace
from asyncrl.errors import ConfigError
from asyncrl.simulation.cost_model.gpus import read_gpus
from asyncrl.simulation.mapping.job_file import FixedSplit, MeasuredStages, PlannedJob, read_job
from asyncrl.simulation.mapping.pool_tables import runs
from asyncrl.simulation.mapping.step_prediction import PredictedStep, StepPredictor

WORTH = 1.1
"""Speed-up below which advice is to stay synchronous: less than that is lost to staleness and a second copy of weights.
"""


def main(arguments: Sequence[str]) -> None:
    job = parsed("asyncrl-bench whatif", __doc__ or "", arguments)
    print("\n".join(described(*predict(job))))


def parsed(program: str, doc: str, arguments: Sequence[str]) -> PlannedJob:
    """Reads the job that the command line names, calibrated by a run if it names one."""
    parser = argparse.ArgumentParser(program, description=doc)
    parser.add_argument("job", type=Path, metavar="JOB.toml", help="Describe models, work of a step and devices.")
    parser.add_argument("--gpus", type=Path, help="Add a TOML or JSON table of GPUs.")
    parser.add_argument("--run", type=Path, metavar="RUN_DIR", help="Calibrate by a finished run of the job's split.")
    asked = parser.parse_args(arguments)
    job = read_job(asked.job, read_gpus(asked.gpus))
    return job if asked.run is None else calibrated_by(job, asked.run)


def calibrated_by(job: PlannedJob, run: Path) -> PlannedJob:
    """Takes the stages of a finished run as the measured ones. Raises ConfigError without the split that it had."""
    if job.tables.split is None:
        raise ConfigError("--run: the job file has no [split], so that nobody knows which GPUs the run had")
    found = overlap_of(read_run(run), read_trace(run / "logs"))
    rest = sum(found.stages.get(name, 0.0) for name in ("training", "critic", "cost_critic", "reference"))
    measured = MeasuredStages(
        generation_seconds=found.stages["generation"] * found.step,
        training_seconds=rest * found.step,
        split=job.tables.split,
        limit=found.limit,
    )
    return job.model_copy(update={"tables": job.tables.model_copy(update={"measured": measured})})


def predict(job: PlannedJob) -> tuple[PredictedStep, PredictedStep]:
    """Predicts the job's split, or the best one, and the synchronous step on all GPUs in turn."""
    predictor = StepPredictor(job, runs(job))
    split = job.tables.split or predictor.best_split(job.work.limit)
    return predictor.predict(split, job.work.limit), predictor.predict(None, 0)


def described(asked: PredictedStep, synchronous: PredictedStep) -> Iterator[str]:
    """Yields the lines about a prediction."""
    split = asked.split
    likely = asked.likely
    assert split is not None, "asked is the split layout"
    yield f"predicted: a step of {asked.seconds} s at limit {asked.limit}, {gpus_of(split)}"
    yield f"  generation: {asked.generation}; training: {asked.training}"
    yield (
        f"  busy: generation {likely.generating:.0%}, training {likely.training:.0%}; mean staleness "
        f"{likely.staleness:.2f}, {likely.masked:.1%} of tokens too old"
    )
    yield f"predicted: a synchronous step of {synchronous.seconds} s on all GPUs in turn"
    yield f"predicted speed-up {asked.speedup_over(synchronous)}; {held_up_by(asked)}"


def gpus_of(split: FixedSplit) -> str:
    return f"{split.generation} GPUs generate and {split.training} train"


def held_up_by(asked: PredictedStep) -> str:
    """Returns what a step waits for, and what to change."""
    likely = asked.likely
    if max(likely.generating, likely.training) < 0.9:
        return "neither side is busy: raise work.limit, or samples"
    if likely.generating > likely.training:
        return "generation holds up the trainer: give it more GPUs"
    return "the trainer holds up generation: give it more GPUs"


def advice(gain: float) -> str:
    """Returns whether to go asynchronous, by the likely speed-up."""
    if gain < WORTH:
        return f"stay synchronous: {gain:.2f} times is under {WORTH}, which does not pay for staleness"
    return f"go asynchronous: {gain:.2f} times as fast is predicted"
