"""`asyncrl-bench advise JOB.toml` says whether a job gains by going asynchronous, and when it does not."""

from collections.abc import Sequence

from asyncrl.bench.measurements import table
from asyncrl.bench.overlap.prediction.what_if import advice, described, gpus_of, parsed
from asyncrl.simulation.mapping.pool_tables import runs
from asyncrl.simulation.mapping.step_prediction import StepPredictor

LIMITS = (1, 2, 4)
"""Staleness limits that are compared."""


def main(arguments: Sequence[str]) -> None:
    job = parsed("asyncrl-bench advise", __doc__ or "", arguments)
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
