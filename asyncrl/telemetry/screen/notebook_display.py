"""Shows a running run in a notebook: one output of a cell with a bar and the last numbers, replaced at each step."""

import sys
from collections.abc import Callable, Mapping
from html import escape
from importlib import import_module
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.telemetry.samples_file import SampleRecord
from asyncrl.telemetry.screen.bottleneck import LongCurve, ServiceLoad, workers_of
from asyncrl.telemetry.screen.display import NO_WORKERS, Display, LineDisplay, Metrics, open_display, shown, skipped

CURVE = 48
"""Characters of the curve of the reward."""
Show = Callable[[str], None]
"""Replaces what the cell shows by this HTML."""


class NotebookDisplay(Display):
    """Has the bar of a run in one output of a cell; what stays is printed below it. show: replaces the output."""

    def __init__(self, steps: int, show: Show, workers: Mapping[str, int] = NO_WORKERS) -> None:
        self._steps = steps
        self._show = show
        self._load = ServiceLoad(workers)
        self._rewards = LongCurve()
        self._lines = LineDisplay(sys.stdout, steps)
        self._step = 0
        self._numbers: list[str] = []

    def __exit__(self, *error: object) -> None:
        self._lines.__exit__(*error)

    def say(self, text: str) -> None:
        self._lines.say(text)

    def step(self, metrics: Metrics, sample: SampleRecord | None) -> None:
        self._step = int(metrics["version"])
        self._load.observe(metrics)
        if isinstance(reward := metrics.get("reward/mean"), float | int):
            self._rewards.add(reward)
        numbers = skipped(metrics) or ", ".join(f"{name} {number}" for name, number in shown(metrics)[:6])
        curve = self._rewards.line(CURVE)
        self._numbers = [numbers, *([f"reward {curve}"] if curve else []), *filter(None, [self._load.bottleneck()])]
        self.progress("")

    def progress(self, text: str) -> None:
        bar = f'<progress value="{self._step}" max="{self._steps}" style="width: 20em"></progress>'
        lines = [f"step {self._step} of {self._steps}", *self._numbers, *filter(None, [text])]
        self._show(f"{bar}<pre>{escape(chr(10).join(lines))}</pre>")


def cell_output() -> Show | None:
    """Returns what replaces an output of the running cell; None where no notebook runs."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or "IPKernelApp" not in shell.config:
        return None
    shown: Any = import_module("IPython.display")
    handle = shown.display(shown.HTML(""), display_id=True)
    return lambda html: handle.update(shown.HTML(html))


def open_cell_or_terminal(config: Config) -> Display:
    """Returns the display of a run that Python starts."""
    workers = workers_of(config)
    every = config.telemetry.print_every
    if every == 0 or (show := cell_output()) is None:
        return open_display(config.steps, workers=workers, print_every=every)
    return NotebookDisplay(config.steps, show, workers)
