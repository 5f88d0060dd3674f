"""Sends metrics and samples to places besides the run directory, TensorBoard and Weights & Biases (optional extras),
and checks the address at which Prometheus scrapes.

A sink runs on a thread of its own, so that a step never waits for one that hangs, fails or is slow.
"""

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from asyncrl.config.install_hints import install_extra
from asyncrl.config.problems import Problem
from asyncrl.config.sections.runtime_config import TelemetryConfig
from asyncrl.errors import ConfigError
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.telemetry.samples_file import SampleRecord

QUEUED_STEPS = 64
"""Steps that a sink may lag behind; at seconds per step a sink that lags for minutes does not catch up."""
TABLE_SECONDS = 60.0
"""Seconds between two tables of samples at wandb, each of which is a file: a run of days has some thousand."""
TABLE_ROWS = 64
"""Samples of a table; samples.jsonl has all that were recorded."""
CELL_CHARACTERS = 4000
"""Characters of a text in a table; a longer one is cut in its middle."""
COLUMNS = (
    *("step", "group", "member", "prompt", "text", "reward", "terms", "advantage", "finish", "tokens", "trained"),
    *("masked", "reason", "first", "last"),
)
"""Columns of such a table: fields of SampleRecord."""
CLOSE_DEADLINE = 5.0
"""Seconds that the end of a run waits for a sink; a run has to end within 10 s."""


class Sink(Protocol):
    """A place for metrics and samples. Its methods may block and raise any error, because they run on a thread of their
    own."""

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None: ...

    def close(self) -> None: ...


class TensorboardSink:
    """Writes scalars to `RUN_DIR/tensorboard`, named as in `metrics.jsonl`, through TensorBoard's own package, without
    torch or TensorFlow."""

    def __init__(self, run_dir: Path, name: str, config: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=10)

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Writes to one wandb run per run directory; a resumed run resumes it. Project and tags are those of the config;
    wandb reads WANDB_MODE and its other environment variables."""

    def __init__(self, run_dir: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        named = run_dir / "run.id"
        chosen = config.get("telemetry", {})
        self._run = wandb.init(
            project=chosen.get("wandb_project") or os.environ.get("WANDB_PROJECT", "asyncrl"),
            tags=list(chosen.get("wandb_tags", ())),
            dir=str(run_dir),
            name=name,
            config=dict(config),
            id=f"asyncrl-{named.read_text().strip()}" if named.exists() else None,
            resume="allow",
        )
        # An evaluation of version v may arrive after later steps; wandb's own step could not go back.
        self._run.define_metric("*", step_metric="step")
        self._make_table = wandb.Table
        self._table_at = -TABLE_SECONDS
        self._unsent: tuple[int, Sequence[SampleRecord]] | None = None

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self._unsent = (step, samples) if samples else self._unsent
        logged: dict[str, Any] = {**metrics, "step": step}
        if samples and time.monotonic() - self._table_at >= TABLE_SECONDS:
            logged["samples"] = self._table(samples)
        self._run.log(logged)

    def _table(self, samples: Sequence[SampleRecord]) -> Any:
        self._table_at = time.monotonic()
        self._unsent = None
        return self._make_table(columns=list(COLUMNS), data=[_row(sample) for sample in samples[:TABLE_ROWS]])

    def close(self) -> None:
        if self._unsent is not None:
            step, samples = self._unsent
            self._run.log({"samples": self._table(samples), "step": step})
        self._run.finish()


def _row(sample: SampleRecord) -> list[Any]:
    """Returns the cells of a sample; an episode has its turns as one text."""
    turns = "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in sample.turns)
    shown = {"prompt": sample.prompt, "text": turns or sample.text, "terms": json.dumps(dict(sample.terms))}
    cells = (shown.get(name, getattr(sample, name)) for name in COLUMNS)
    return [_cut(cell) if isinstance(cell, str) else cell for cell in cells]


def _cut(text: str) -> str:
    half = CELL_CHARACTERS // 2
    return text if len(text) <= CELL_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


SINKS: dict[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {"tensorboard": TensorboardSink, "wandb": WandbSink}


def sink_problems(names: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each sink whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            text = f"the package of {name!r} is not installed; run: {install_extra(name)}"
            yield Problem("telemetry.sinks", "", text)


def open_sinks(
    names: Sequence[str], run_dir: Path, run_name: str, config: Mapping[str, Any], say: Callable[[str], None]
) -> "list[SinkWorker]":
    """Starts the named sinks; they open on their own threads. `say` gets one line for each that is left out."""
    return [SinkWorker(name, partial(SINKS[name], run_dir, run_name, config), say) for name in names]


Queued = tuple[int, Mapping[str, float], Sequence[SampleRecord]]


class SinkWorker:
    """Feeds one sink through a bounded queue; leaves it out, with one warning, when it is down or too slow. open_sink:
    makes the sink; called on the thread. say: gets the warning; called from either thread."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self._name = name
        self._open = open_sink
        self._say = say
        self._queue: queue.Queue[Queued | None] = queue.Queue(QUEUED_STEPS)
        self.left_out = False
        self._leaving = threading.Lock()
        # A daemon thread, because a sink that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._feed, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, object], samples: Sequence[SampleRecord] = ()) -> None:
        """Queues the metrics of one step that are numbers, and samples that it trained; returns at once."""
        if self.left_out:
            return
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        try:
            self._queue.put_nowait((step, numbers, samples))
        except queue.Full:
            self._leave_out(f"is {QUEUED_STEPS} steps behind at step {step}")

    def close(self, deadline: float = CLOSE_DEADLINE) -> None:
        """Lets the sink finish, and waits for it at most `deadline` seconds."""
        if not self.left_out:
            try:
                self._queue.put(None, timeout=deadline)
            except queue.Full:
                self._leave_out(f"did not take its last points within {deadline:g} s")
        self._thread.join(0.0 if self.left_out else deadline)
        if self._thread.is_alive():
            self._leave_out(f"did not close within {deadline:g} s; its last points may be missing")

    def _feed(self) -> None:
        try:
            sink = self._open()
            while not self.left_out and (item := self._queue.get()) is not None:
                sink.write(*item)
            sink.close()
        except Exception as error:  # foreign code: none of its errors may end the run
            self._leave_out(f"failed with {type(error).__name__}: {error}")

    def _leave_out(self, why: str) -> None:
        with self._leaving:
            first = not self.left_out
            self.left_out = True
        if first:
            self._say(f"the sink {self._name} {why}: it is left out; metrics.jsonl has everything")


# The address at which metrics are scraped, and the token that scrapes send; read without the packages of the extra.


SHORTEST_TOKEN = 16
"""Characters of a token, below which it could be guessed."""


def scrape_problems(section: TelemetryConfig) -> Iterator[Problem]:
    """Yields a problem when the address is taken, or not of this machine, or there is no token in its file."""
    if section.prometheus:
        try:
            bound_socket(*host_and_port(section.prometheus), "telemetry.prometheus").close()
            if section.prometheus_token:
                read_token(section.prometheus_token)
        except ConfigError as error:
            yield Problem.of_error(error, "telemetry.prometheus")


def host_and_port(address: str) -> tuple[str, int]:
    """Splits HOST:PORT; a number of IPv6 is in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def read_token(file: str) -> str:
    """Returns the token in a file. Raises ConfigError for a file that cannot be read, and for a token that is short."""
    try:
        token = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"telemetry.prometheus_token: {file} cannot be read: {error}") from error
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"telemetry.prometheus_token: {file} holds no token: write at least {SHORTEST_TOKEN} letters and digits "
            "into it, such as from `openssl rand -hex 16`"
        )
    return token
