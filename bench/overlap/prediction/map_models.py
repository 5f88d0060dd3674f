"""`asyncrl-bench map JOB.toml` finds on which GPUs each model of a job runs, in which of the layouts that asyncrl has,
and why; it writes the pools of an experiment file."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.bench.measurements import table
from asyncrl.errors import ConfigError
from asyncrl.simulation.cost_model.gpus import read_gpus
from asyncrl.simulation.mapping.job_file import read_job
from asyncrl.simulation.mapping.pool_tables import pool_tables, runs
from asyncrl.simulation.mapping.search import FoundMapping, MappingSearch
from asyncrl.simulation.mapping.strategies import STAGES

SHOWN = 6
"""Placements that are listed: the best ones."""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench map", description=__doc__)
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
    print("\n".join(described(found, search.considered)))
    if asked.write is None:
        print(f"\n{pool_tables(found[0])}", end="")
    else:
        asked.write.write_text(pool_tables(found[0]))
        print(f"wrote {asked.write}")


def described(found: Sequence[FoundMapping], considered: int) -> Iterator[str]:
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
    rows = [[each.name, f"{each.cost:.4g}", f"{each.cost / best.cost:.2f}"] for each in found[:SHOWN]]
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
