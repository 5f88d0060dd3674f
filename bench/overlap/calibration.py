"""Chooses how long emulated stages take: as a finished run did, or as typed."""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import log
from pathlib import Path
from statistics import fmean, pstdev

from asyncrl.bench.overlap.accounting import overlap_of
from asyncrl.bench.overlap.emulation.stage_times import LengthSpread, StageTimes
from asyncrl.config.schema import Config
from asyncrl.deploy.report.run_record import RunRecord, read_run
from asyncrl.deploy.report.worker_trace import read_trace
from asyncrl.errors import ConfigError

LENGTHS = ("mean", "sigma", "cap")
TIMES = tuple(each.name for each in fields(StageTimes) if each.name not in ("lengths", "slots", "update"))


def stage_times(config: Config, typed: Sequence[str], run: Path | None) -> StageTimes:
    """Returns the times of emulated stages. typed: such as "token=0.01" and "sigma=1", over those of the run, or else
    over balanced stages. Raises ConfigError."""
    times = balanced(config) if run is None else calibrated(config, read_run(run), run)
    values = dict(_value(text) for text in typed)
    spread = {name: values.pop(name) for name in LENGTHS if name in values}
    lengths = replace(times.lengths, **spread)  # type: ignore[arg-type]
    return replace(times, **values, lengths=replace(lengths, cap=int(lengths.cap)))  # type: ignore[arg-type]


def balanced(config: Config) -> StageTimes:
    """Returns times of a made-up engine: reading weights takes 10 ms a token, the cache of a sample 60 us more, lengths
    are lognormal with sigma 1, and training takes as long as generation with all slots full."""
    token, each, slots = 0.01, 60e-6, config.generation.slots
    lengths = LengthSpread(config.generation.max_new_tokens / 4, 1.0, config.generation.max_new_tokens)
    return StageTimes(lengths, token, each, slots, trained_token=(token + each * slots) / slots)


def calibrated(config: Config, run: RunRecord, path: Path) -> StageTimes:
    """Returns the times of a run: its busy seconds, spread over what it sampled and trained."""
    found = overlap_of(run, read_trace(path / "logs"))
    tokens, samples = found.tokens * found.step, config.task.prompts_per_step * config.task.samples_per_prompt
    busy = {stage: share * found.step for stage, share in found.stages.items()}
    sync = {service: shares["sync"] * found.step for service, shares in found.shares.items()}
    mean = fmean(step["completions/length_mean"] for step in run.steps)
    lengths = [log(max(1, sample.tokens)) for sample in run.samples]
    slots = min(config.generation.slots, samples)
    return StageTimes(
        lengths=LengthSpread(mean, pstdev(lengths) if lengths else 0.0, config.generation.max_new_tokens),
        token=busy["generation"] * slots / tokens,
        slots=config.generation.slots,
        load=sync["generation"],
        score=busy.get("reward", 0.0) / samples,
        reference=busy.get("reference", 0.0) / samples,
        trained_token=busy["training"] / tokens,
        publish=sync["training"],
    )


def _value(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in (*TIMES, *LENGTHS):
        raise ConfigError(f"--times {text}: there is no {name!r}; these are there: {', '.join((*LENGTHS, *TIMES))}")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--times {text}: write a number after {name}=") from None
