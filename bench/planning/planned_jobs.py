"""Says of a job on GPUs that one may not have which model runs where, how long a step takes, and whether asynchrony
pays."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.bench.measurements import table
from asyncrl.bench.overlap.accounting import overlap_of
from asyncrl.deploy.report.run_record import read_run
from asyncrl.deploy.report.worker_trace import read_trace
from asyncrl.errors import ConfigError
from asyncrl.simulation.planning.gpus import read_gpus
from asyncrl.simulation.planning.job_file import FixedSplit, MeasuredStages, PlannedJob, read_job
from asyncrl.simulation.planning.pool_tables import pool_tables, runs
from asyncrl.simulation.planning.search import FoundMapping, MappingSearch
from asyncrl.simulation.planning.step_prediction import PredictedStep, StepPredictor
from asyncrl.simulation.planning.strategies import STAGES

WORTH = 1.1
"""Speed-up below which advice is to stay synchronous: less than that is lost to staleness and a second copy of weights.
"""


# ---- `asyncrl-bench whatif JOB.toml` ----


def what_if(arguments: Sequence[str]) -> None:
    """Predicts the step of a job: the real controller runs on virtual time, on stages with predicted seconds; a run
    directory calibrates them."""
    job = parsed("asyncrl-bench whatif", what_if.__doc__ or "", arguments)
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


# ---- `asyncrl-bench map JOB.toml` ----

PLACEMENTS_SHOWN = 6
"""Placements that are listed: the best ones."""


def map_models(arguments: Sequence[str]) -> None:
    """Finds on which GPUs each model of a job runs, in which of the layouts that asyncrl has, and why; writes the pools
    of an experiment file."""
    parser = argparse.ArgumentParser("asyncrl-bench map", description=map_models.__doc__)
    parser.add_argument("job", type=Path, metavar="JOB.toml", help="Describe models, work of a step and devices.")
    parser.add_argument("--gpus", type=Path, help="Add a TOML or JSON table of GPUs.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Write [pools] there instead of printing them.")
    asked = parser.parse_args(arguments)
    job = read_job(asked.job, read_gpus(asked.gpus))
    search = MappingSearch(job, runs(job))
    try:
        found = search.best()
    except ConfigError as error:
        best = MappingSearch(job).best()[0]  # Raises where nothing fits at all.
        degrees = "; ".join(
            f"{role}: {strategy}"
            for each in best.sets
            for role, strategy in zip(each.roles, each.strategies, strict=True)
        )
        raise ConfigError(f"{error}; asyncrl has no such layouts as the best one that would fit ({degrees})") from error
    print("\n".join(mapping_lines(found, search.considered)))
    if asked.write is None:
        print(f"\n{pool_tables(found[0])}", end="")
    else:
        asked.write.write_text(pool_tables(found[0]))
        print(f"wrote {asked.write}")


def mapping_lines(found: Sequence[FoundMapping], considered: int) -> Iterator[str]:
    """Yields the lines about the best mapping and about those that it beats."""
    best = found[0]
    objective = best.job.tables.objective
    yield f"predicted seconds, {objective}: {best.predicted}"
    rows = []
    for placed in best.sets:
        rates = placed.group.gpu.likely
        stages = [f"{seconds:.3g}" for seconds in best.stages_of(placed, rates)]
        rows.append([" + ".join(placed.roles), f"{placed.gpus} {placed.group.name}", *stages])
        rows += [
            [f"  {role}", str(strategy), "", "", ""]
            for role, strategy in zip(placed.roles, placed.strategies, strict=True)
        ]
    yield table(["roles", "GPUs", *STAGES], rows)
    stage, placed = best.slowest
    yield f"why: {reason(best)}; the longest stage is {stage} of {' + '.join(placed.roles)}"
    yield f"{len(found)} placements fit; {considered:,} allocations were compared"
    rows = [[each.name, f"{each.cost:.4g}", f"{each.cost / best.cost:.2f}"] for each in found[:PLACEMENTS_SHOWN]]
    yield table(["placement", "likely s", "over the best"], rows)


def reason(best: FoundMapping) -> str:
    """Returns which term of the objective decides, in words."""
    if len(best.sets) == 1:
        return "one set on all GPUs is the fastest: every stage uses all of them"
    stages = [best.stages_of(each, each.group.gpu.likely) for each in best.sets]
    if best.job.tables.objective == "iteration":
        return "sets of fewer GPUs that work side by side lose less to collectives and pipelines than they wait"
    busiest = max(float(each.sum()) for each in stages)
    if best.cost > busiest * (1 + 1e-9):
        return f"the staleness limit {best.job.work.limit} decides: a cycle takes longer than limit + 1 steps"
    busy = ", ".join(f"{each.sum() / busiest:.0%}" for each in stages)
    return f"services overlap, and sets are busy for {busy} of a step"


# ---- `asyncrl-bench advise JOB.toml` ----

LIMITS = (1, 2, 4)
"""Staleness limits that are compared."""


def advise(arguments: Sequence[str]) -> None:
    """Says whether a job gains by going asynchronous, and when it does not."""
    job = parsed("asyncrl-bench advise", advise.__doc__ or "", arguments)
    predictor = StepPredictor(job, runs(job))
    synchronous = predictor.predict(None, 0)
    limits = (job.work.limit,) if job.tables.split else LIMITS
    found = [predictor.predict(job.tables.split or predictor.best_split(limit), limit) for limit in limits]
    best = min(found, key=lambda each: each.seconds.likely)
    rows = [
        [
            str(each.limit),
            gpus_of(each.split) if each.split else "",
            str(each.seconds),
            str(each.speedup_over(synchronous)),
        ]
        for each in found
    ]
    print(table(["limit", "split", "s a step", "speed-up"], rows))
    print("\n".join(described(best, synchronous)))
    print(advice(best.speedup_over(synchronous).likely))
