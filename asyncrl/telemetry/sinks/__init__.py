"""Where metrics go besides `metrics.jsonl`: services of others, each an extra, all behind one small interface."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.installing import install_extra
from asyncrl.telemetry.sinks.worker import Sink, SinkWorker

OpenSink = Callable[[Path, str, Mapping[str, Any]], Sink]


def _tensorboard(run_dir: Path, name: str, config: Mapping[str, Any]) -> Sink:
    from asyncrl.telemetry.sinks.tensorboard import TensorboardSink

    return TensorboardSink(run_dir / "tensorboard")


def _wandb(run_dir: Path, name: str, config: Mapping[str, Any]) -> Sink:
    from asyncrl.telemetry.sinks.wandb import WandbSink

    return WandbSink(run_dir, name, config)


SINKS: dict[str, OpenSink] = {"tensorboard": _tensorboard, "wandb": _wandb}


def check_sinks(names: Sequence[str]) -> None:
    """Raises ConfigError when the package of one of these is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"telemetry.sinks names {name!r}, whose package is missing; run: {install_extra(name)}")


def open_sinks(
    names: Sequence[str], run_dir: Path, run_name: str, config: Mapping[str, Any], say: Callable[[str], None]
) -> list[SinkWorker]:
    """Start the named sinks; they open on their own threads. `say` gets one line for each that is left out.

    Raises:
        ConfigError: the package of a sink is not installed.
    """
    check_sinks(names)
    return [SinkWorker(name, partial(SINKS[name], run_dir, run_name, config), say) for name in names]
