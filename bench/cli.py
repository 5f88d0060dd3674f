"""Runs one measurement: `asyncrl-bench NAME`."""

import sys
from importlib import import_module

BENCHMARKS = {
    "channels": ("transfer_speed.channels", "calls and batches between processes, beside memcpy and other systems"),
    "lanes": ("control_calls", "control calls beside queued work, event loop stalls in a message flood"),
    "end-to-end": ("end_to_end", "trained tokens per second, beside TRL and beside synchronous runs"),
    "packed-rows": ("packed_rows", "a step of packed rows with shared prompts, beside padded rows"),
    "generation": ("generation_speed", "useful tokens per CPU-second, beside transformers.generate"),
    "overhead": ("overhead.runtime_cost", "runtime added to stages that only sleep, and the CPU time of tracing"),
    "learning": ("learning.benchmark", "rewards of presets, limits and policies over seeds; writes docs/learning.md"),
    "start": ("overhead.start_cost", "command to first step, a killed worker, memory; forked, spawned"),
    "weights": ("transfer_speed.weight_plans", "the plan of a transfer of weights: bytes, senders, time on links"),
    "gpu": ("gpu.benchmark", "weights on a GPU: copies, CUDA memory of processes, NCCL, updates; sampling, training"),
    "scale": (
        "overhead.controller_scale",
        "CPU time of the controller a sample, by samples in flight, workers and ranks",
    ),
    "sandbox": ("overhead.sandbox_throughput", "sandboxed programs a second, beside bare starts of the interpreter"),
    "episodes": ("overhead.episode_throughput", "episodes a second in children, beside the class in one loop"),
    "overlap": (
        "overlap.comparison",
        "of runs, or of an experiment in several modes: overlap, gains, the bottleneck",
    ),
    "diff": ("overlap.finished_runs:diff", "of two finished runs: where their steps differ"),
    "why": ("overlap.finished_runs:why", "of a finished run: what made its slowest step slow"),
    "map": (
        "planning.planned_jobs:map_models",
        "of a job: which model runs on which GPUs, in which layout; writes [pools]",
    ),
    "whatif": (
        "planning.planned_jobs:what_if",
        "of a job: predicted seconds of a step, by the real controller on virtual time",
    ),
    "advise": ("planning.planned_jobs:advise", "of a job: whether to go asynchronous, and when not"),
    "validate": (
        "planning.validate",
        "of map and whatif: predictions beside published rows, and which of them miss",
    ),
}
"""Each command name with its module, its function there if that is not `main`, and its line of help."""
FINISHED = (
    *(
        "accounting",
        "asynchrony",
        "checkpoints",
        "codecs",
        "loading-memory",
        "policies",
        "rank-memory",
        "regroup",
        "transfers",
    ),
)
"""Names of studies that have their answer."""


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        listed = "\n".join(f"  {key:10} {help_text}" for key, (_, help_text) in BENCHMARKS.items())
        usage = f"usage: asyncrl-bench NAME [flags]\n{listed}"
        if name not in {"", "-h", "--help"}:
            problem = f"there is no benchmark {name!r}"
            if name in FINISHED:
                problem = f"{name} is a finished study, which was removed; its results stand in docs/log.md"
            print(f"asyncrl-bench: {problem}; these are there:\n\n{usage}", file=sys.stderr)
            sys.exit(2)
        print(usage)
        sys.exit(0)
    from asyncrl.errors import ConfigError

    try:
        module, _, function = BENCHMARKS[name][0].partition(":")
        getattr(import_module(f"asyncrl.bench.{module}"), function or "main")(sys.argv[2:])
        sys.stdout.flush()
    except ConfigError as error:
        print(f"asyncrl-bench: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # Whoever read our output has gone (`| head`); Python must not try to flush it once more.
        sys.stdout = None


if __name__ == "__main__":
    main()
