"""`asyncrl-bench validate` holds the predictions against published rows and lists those that miss.

A ratio comes out when the likely one is within 15 % of the published one, seconds when they are in the interval. No row
has a constant of its own; what a source does not say is assumed in `published_rows.json`.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from asyncrl.bench.measurements import table
from asyncrl.errors import ConfigError
from asyncrl.simulation.planning import formulas
from asyncrl.simulation.planning.formulas import Degrees
from asyncrl.simulation.planning.gpus import Gpu, Rates, known_gpus
from asyncrl.simulation.planning.job_file import JobTables, PlannedJob, planned
from asyncrl.simulation.planning.model_size import WIDE, ModelSize, model_size
from asyncrl.simulation.planning.predictions import USABLE, CostModel
from asyncrl.simulation.planning.search import MappingSearch
from asyncrl.simulation.planning.step_prediction import PredictedStep, StepPredictor
from asyncrl.simulation.planning.strategies import STATES

# Seconds of a PPO iteration in systems that HybridFlow was compared with, by their mechanisms (its table 1 and 8.1).
#
#     DeepSpeed-Chat   all models on all GPUs in turn; fully sharded training; weights gathered whole for generation,
#                      with tensor parallelism within a host
#     OpenRLHF         actor, its copy for generation, critic, and the two scoring models on a quarter of the GPUs each;
#                      fully sharded training; weights copied from the actor to its copy
#
# NeMo-Aligner is left out: by the paper it generates without a cache of keys and values, which would take some
# hundred times as long, and the share of an iteration that the paper gives for it does not fit that.


MICRO_BATCH = 4
"""Samples of a GPU in one pass of fully sharded training, as in examples of both systems."""


def deepspeed_chat_seconds(job: PlannedJob, level: int) -> float:
    """Returns the seconds of an iteration at one level of efficiency."""
    group = job.groups[0]
    work = job.work
    rates = group.gpu.levels[level]
    count = group.count
    held = (2 * STATES + 2 * WIDE) * job.sizes["actor"].parameters / count
    tp = min(group.each, count)
    seconds = _sampling_seconds(job, group.gpu, rates, Degrees(tp, 1, count // tp), held)
    seconds += formulas.transition_seconds(job.sizes["actor"], rates, Degrees(dp=count), Degrees(tp), "sharded")
    for role in ("critic", "reference", "reward"):
        seconds += sharded_scoring_seconds(job.sizes[role], rates, work.samples, work.tokens, count)
    return seconds + sum(_training_seconds(job, role, rates, count) for role in ("actor", "critic"))


def open_rlhf_seconds(job: PlannedJob, level: int) -> float:
    """Returns the seconds of an iteration at one level of efficiency."""
    group = job.groups[0]
    work = job.work
    rates = group.gpu.levels[level]
    quarter = group.count // 4
    if quarter < 1:
        raise ConfigError("OpenRLHF's placement needs four GPUs at least")
    actor = job.sizes["actor"]
    tp = next(tp for tp in (1, 2, 4, 8) if tp == 8 or WIDE * actor.parameters / tp < group.gpu.memory / 2)
    tp = min(tp, quarter)
    seconds = _sampling_seconds(job, group.gpu, rates, Degrees(tp, 1, quarter // tp), 0.0)
    seconds += formulas.transition_seconds(actor, rates, Degrees(dp=group.count), Degrees(tp), "copied")
    scored = [
        sharded_scoring_seconds(job.sizes[role], rates, work.samples, work.tokens, quarter)
        for role in ("critic", "reference", "reward")
    ]
    return (
        seconds
        + max(scored[0], scored[1] + scored[2])
        + max(_training_seconds(job, role, rates, quarter) for role in ("actor", "critic"))
    )


def sharded_scoring_seconds(size: ModelSize, rates: Rates, samples: int, length: float, gpus: int) -> float:
    """Returns seconds of a forward pass of fully sharded parameters, gathered once for each micro-batch (Z)."""
    work = formulas.scoring_seconds(size, rates, samples, length, Degrees(dp=gpus))
    passes = ceil(samples / gpus / MICRO_BATCH)
    return work + passes * formulas.gather(rates, WIDE * size.parameters, gpus, gpus, 1)


def _training_seconds(job: PlannedJob, role: str, rates: Rates, gpus: int) -> float:
    work = job.work
    return formulas.sharded_training_seconds(
        job.sizes[role], rates, work.samples, work.tokens, gpus, work.updates, MICRO_BATCH
    )


def _sampling_seconds(job: PlannedJob, gpu: Gpu, rates: Rates, degrees: Degrees, held: float) -> float:
    work = job.work
    size = job.sizes["actor"]
    free = USABLE * gpu.memory - held - WIDE * size.parameters / degrees.replica
    room = formulas.room_for(size, free, work.tokens, degrees)
    if not room:
        raise ConfigError(f"{size.name} does not generate on {degrees.gpus} GPUs")
    sequences = ceil(work.samples / degrees.dp)
    lengths = work.prompt_tokens, work.response_tokens
    return formulas.generation_seconds(size, rates, sequences, *lengths, degrees, min(room, sequences))


TOLERANCE = 0.15
HYBRIDFLOW_NETWORK = 25e9 / 8
"""Bytes a second of one GPU on HybridFlow's testbed: 200 Gb/s for eight."""
PPO = ("actor", "critic", "reference", "reward")
SYSTEMS = {"OpenRLHF": open_rlhf_seconds, "DeepSpeed-Chat": deepspeed_chat_seconds}
Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PublishedComparison:
    """A published row beside its prediction."""

    name: str
    published: str
    predicted: str
    agrees: bool


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench validate", description=__doc__)
    parser.add_argument("--only", default="", help="Compare only rows whose name contains this.")
    asked = parser.parse_args(arguments)
    known = read_rows()
    found = [compared(row) for row in known["rows"] if asked.only in row["id"]]
    cells = [[each.name, each.published, each.predicted, "yes" if each.agrees else "MISSES"] for each in found]
    print(table(["row", "published", "predicted", "agrees"], cells))
    print(f"{sum(each.agrees for each in found)} of {len(found)} rows come out; those that miss:")
    for each in found:
        if not each.agrees:
            print(f"  {each.name}: {known['misses'].get(each.name, 'no reason is known')}")


def read_rows() -> Any:
    return json.loads((Path(__file__).parent / "published_rows.json").read_text())


def compared(row: Row) -> PublishedComparison:
    """Predicts a row. One that cannot be predicted misses."""
    try:
        predicted, agrees = KINDS[row["kind"]](row)
    except ConfigError as error:
        predicted = str(error)
        agrees = False
    return PublishedComparison(row["id"], str(row["published"]), predicted, agrees)


def near(found: float, published: float) -> bool:
    return abs(found - published) <= TOLERANCE * published


def _transition(row: Row) -> tuple[str, bool]:
    costs = CostModel(model_size(row["model"]), known_gpus()["A100"])
    tp, pp, dp = row["train"]
    layouts = Degrees(tp, pp, dp), Degrees(*row["generate"])
    ours, theirs = (costs.transition(*layouts, mechanism) for mechanism in ("hybridflow", row["beside"]))
    cut = 1 - ours.likely / theirs.likely
    return f"{cut:.3f}", near(cut, row["published"])


def _generation(row: Row) -> tuple[str, bool]:
    costs = CostModel(model_size(row["model"]), known_gpus()["A100"])
    small, large = (
        costs.generation(1024 * degree // row["gpus"], 1024, 1024, Degrees(degree)) for degree in row["degrees"]
    )
    cut = 1 - small.likely / large.likely
    return f"{cut:.3f}", near(cut, row["published"])


def _placement(row: Row) -> tuple[str, bool]:
    best = MappingSearch(_ppo(row["model"], row["gpus"], tuple(row["layout"]))).best()[0]
    found = "shared" if len(best.sets) == 1 else "split"
    return f"{found}: {best.predicted} s", found == row["published"]


def _beside(row: Row) -> tuple[str, bool]:
    mean = fmean(_speedups(row["system"]))
    return f"{mean:.2f}", near(mean, row["published"])


def _range(row: Row) -> tuple[str, bool]:
    found, (low, high) = _speedups(row["system"]), row["published"]
    return f"{min(found):.2f} to {max(found):.2f}", low <= min(found) and max(found) <= high


@cache
def _speedups(system: str) -> list[float]:
    """Returns the likely speed-ups of the best mapping over a system, where both fit."""
    found = []
    for model in ("llama-7b", "llama-13b", "llama-34b", "llama-70b"):
        for gpus in (8, 16, 32, 64, 96, 128):
            job = _ppo(model, gpus, None)
            try:
                found.append(SYSTEMS[system](job, 1) / MappingSearch(job).best()[0].cost)
            except ConfigError:
                continue
    return found


def _step(row: Row) -> tuple[str, bool]:
    found = _predict(row["job"], row["limit"]).seconds
    return str(found), row["published"] in found


def _speedup(row: Row) -> tuple[str, bool]:
    found = _predict(row["job"], row["limit"]).speedup_over(_predict(row["beside"], 0))
    return str(found), near(found.likely, row["published"])


def _predict(tables: Any, limit: int) -> PredictedStep:
    return _predicted(json.dumps(tables, sort_keys=True), limit)


@cache
def _predicted(tables: str, limit: int) -> PredictedStep:
    job = planned(JobTables.model_validate_json(tables), known_gpus())
    return StepPredictor(job).predict(job.tables.split, limit)


def _ppo(model: str, gpus: int, layout: tuple[int, int] | None) -> PlannedJob:
    """Returns HybridFlow's experiment with PPO: 8 updates on 1,024 samples of 1,024 + 1,024 tokens."""
    tables = {
        "models": dict.fromkeys(PPO, model),
        "devices": [{"gpu": "A100", "hosts": gpus // 8, "network": HYBRIDFLOW_NETWORK}],
        "layouts": dict.fromkeys(PPO, layout) if layout else {},
        "work": {"updates": 8},
    }
    return planned(JobTables.model_validate(tables), known_gpus())


KINDS: Mapping[str, Callable[[Row], tuple[str, bool]]] = {
    "transition": _transition,
    "generation": _generation,
    "placement": _placement,
    "beside": _beside,
    "range": _range,
    "step": _step,
    "speedup": _speedup,
}
