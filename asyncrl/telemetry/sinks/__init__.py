"""Sinks: places for metrics besides `metrics.jsonl`, each an optional extra behind one interface."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.install_hints import install_extra
from asyncrl.config.problems import Problem, refuse
from asyncrl.telemetry.sinks.worker import Sink, SinkWorker

OpenSink = Callable[[Path, str, Mapping[str, Any]], Sink]


def _tensorboard(run_dir: Path, name: str, config: Mapping[str, Any]) -> Sink:
    from asyncrl.telemetry.sinks.tensorboard import TensorboardSink

    return TensorboardSink(run_dir / "tensorboard")


def _wandb(run_dir: Path, name: str, config: Mapping[str, Any]) -> Sink:
    from asyncrl.telemetry.sinks.wandb import WandbSink

    return WandbSink(run_dir, name, config)


SINKS: dict[str, OpenSink] = {"tensorboard": _tensorboard, "wandb": _wandb}


def sink_problems(names: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each sink whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            yield Problem(
                "telemetry.sinks", "", f"the package of {name!r} is not installed; run: {install_extra(name)}"
            )


def open_sinks(
    names: Sequence[str], run_dir: Path, run_name: str, config: Mapping[str, Any], say: Callable[[str], None]
) -> list[SinkWorker]:
    """Starts the named sinks; they open on their own threads. `say` gets one line for each that is left out.

    Raises:
        ConfigError: the package of a sink is not installed.
    """
    refuse(sink_problems(names))
    return [SinkWorker(name, partial(SINKS[name], run_dir, run_name, config), say) for name in names]
