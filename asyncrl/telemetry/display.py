"""Shows a running run: a live view on a terminal, a table with one line per step when the output is piped, one output
of a cell in a notebook."""

import re
import sys
import termios
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from html import escape
from importlib import import_module
from types import MappingProxyType
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from structlog.typing import FilteringBoundLogger

from asyncrl.config.schema import Config
from asyncrl.telemetry.bottleneck import LongCurve, ServiceLoad, workers_of
from asyncrl.telemetry.clean_text import cleaned
from asyncrl.telemetry.sample_panel import Items, sample_panel
from asyncrl.telemetry.samples_file import SampleRecord

Metrics = Mapping[str, Any]
NO_WORKERS: Mapping[str, int] = MappingProxyType({})

SHOWN: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", ".3f"),
    ("reward/std", "spread", ".3f"),
    ("reward/equal_groups", "equal groups", ".0%"),
    ("cost/mean", "cost", ".3f"),
    ("cost/multiplier", "multiplier", ".2g"),
    ("critic/explained_variance", "explained", ".2f"),
    ("eval/reward/mean", "held out", ".3f"),
    ("perf/tokens_per_s", "trained tokens/s", ",.0f"),
    ("completions/length_mean", "length", ".1f"),
    ("staleness/mean", "staleness", ".2f"),
    ("staleness/max", "oldest", ".0f"),
    ("mask/stale_fraction", "masked", ".1%"),
    ("policy/kl_rollout_train", "kl to engine (k1)", ".2g"),
    ("policy/kl_reference", "kl to reference", ".2g"),
    ("policy/clip_frac", "clipped", ".1%"),
    ("grad_norm", "gradient", ".2g"),
    ("policy/entropy", "entropy", ".2g"),
)
"""Metric, its name on the screen, and the format of its number."""
SHOWN_OF_ACTING: tuple[tuple[str, str, str], ...] = (
    ("acting/return_last20", "return", ",.5g"),
    ("acting/length_mean", "steps an episode", ",.1f"),
    ("eval/return/mean", "evaluated", ",.5g"),
    ("perf/tokens_per_s", "transitions/s", ",.0f"),
    ("staleness/mean", "staleness", ".2f"),
    ("staleness/max", "oldest", ".0f"),
    ("environment/lost_episodes", "lost episodes", ".0f"),
    ("mask/stale_fraction", "left out", ".1%"),
    ("replay/transitions", "replay", ",.0f"),
    ("replay/age_mean", "replay age", ".1f"),
    ("sac/temperature", "temperature", ".2g"),
    ("policy/entropy", "entropy", ".2f"),
    ("critic/explained_variance", "explained", ".2f"),
    ("policy/kl_rollout_train", "kl to acting", ".2g"),
    ("policy/clip_frac", "clipped", ".1%"),
    ("grad_norm", "gradient", ".2g"),
)
"""Metric, name and format of a policy that acts."""
ACTS = "acting/transitions"
"""Metric that each step of a policy that acts has."""
COLUMNS: tuple[tuple[str, str, int, int], ...] = (
    ("reward/mean", "reward ± spread", 19, 3),
    ("cost/mean", "cost", 8, 3),
    ("eval/reward/mean", "held out", 8, 3),
    ("completions/length_mean", "length", 8, 1),
)
COLUMNS_OF_ACTING: tuple[tuple[str, str, int, int], ...] = (
    ("acting/return_last20", "return", 9, 2),
    ("eval/return/mean", "evaluated", 9, 2),
    ("acting/length_mean", "steps an episode", 16, 1),
)
"""Metric, heading, width and decimals of the columns of lines; `cost` is one where the first line has it."""
KEY_OF_PAGE = re.compile(r"([?#&](?:key|token)=)[^&\s]+")
"""In the address of a page, which a terminal shows to who started the run, and a log keeps for others."""
MOST_WAITS = 60
"""Calls of `progress`, one in ten seconds, of which lines show at least one."""

SHOWN_CHARACTERS = 300
"""Characters shown of a sample's prompt and of its text, so that all fits on a screen of 24 lines."""


class CleanConsole(Console):
    """A console that cleans what it renders. file: standard output without its cleaner, since colours are controls."""

    def __init__(self, file: TextIO | None = None, **options: Any) -> None:
        super().__init__(file=getattr(file, "raw", file), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for each in super().render(renderable, options):
            yield each if each.control else Segment(cleaned(each.text), each.style)


class Display(AbstractContextManager["Display", None]):
    """Shows a run. Methods may be called from any thread and never block on the output."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Prints one line that stays, such as a warning or the place of the results."""

    @abstractmethod
    def step(self, metrics: Metrics, sample: SampleRecord | None) -> None:
        """Shows a finished step; `sample` is one of those it trained."""

    @abstractmethod
    def progress(self, text: str) -> None:
        """Shows what the run does between two steps."""

    def settle(self) -> None:
        """Ends a picture: it stays as it is, and what is said from now on stands below it."""

    def note(self, event: str, **fields: str) -> None:
        """Takes what happened for a log; nothing of it is shown."""


def open_display(
    steps: int, stream: TextIO | None = None, workers: Mapping[str, int] = NO_WORKERS, print_every: int = 1
) -> Display:
    """Returns the live view if `stream` (standard output) is a terminal, else lines. steps: of the whole run. workers:
    as in ServiceLoad. print_every: as in LineDisplay; 0 is without the live view too."""
    stream = stream or sys.stdout
    console = CleanConsole(stream)
    is_live = console.is_terminal and print_every
    return LiveDisplay(console, steps, workers) if is_live else LineDisplay(stream, steps, print_every)


class LoggedDisplay(Display):
    """Shows everything on another display, and writes what stays into the controller's log."""

    def __init__(self, display: Display, log: FilteringBoundLogger) -> None:
        self._display = display
        self._log = log

    def __exit__(self, *_: object) -> None:
        """Leaves the other display as it is."""

    def say(self, text: str) -> None:
        self._display.say(text)
        self.note("said", text=text)

    def note(self, event: str, **fields: str) -> None:
        with suppress(OSError):  # A full disk ends the run where data is written; its message comes through here.
            self._log.info(event, **{name: KEY_OF_PAGE.sub(r"\1***", text) for name, text in fields.items()})

    def step(self, metrics: Metrics, sample: SampleRecord | None) -> None:
        self._display.step(metrics, sample)

    def progress(self, text: str) -> None:
        self._display.progress(text)

    def settle(self) -> None:
        self._display.settle()


class LineDisplay(Display):
    """Prints a table with one line for each `print_every` steps, and for the last one; 0: neither lines nor progress.
    What goes on between two steps is shown half as often after each time."""

    def __init__(self, stream: TextIO, steps: int, print_every: int = 1) -> None:
        self._stream = stream
        self._steps = steps
        self._every = print_every
        self._columns: list[tuple[str, str, int, int]] = []
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._evaluated: dict[str, Any] = {}
        self._waits = 0
        self._next_wait = 1
        self._reader_gone = False

    def __exit__(self, *_: object) -> None:
        if not self._reader_gone:
            self._stream.flush()

    def say(self, text: str) -> None:
        if self._reader_gone:
            return
        try:
            print(cleaned(text), file=self._stream, flush=True)
        except OSError:  # The reader, e.g. `| head` or a terminal, has gone; the run goes on without output.
            self._reader_gone = True

    def step(self, metrics: Metrics, sample: SampleRecord | None) -> None:
        self._waits = 0
        step = int(metrics["step"])
        name = f"step {metrics['step']}/{self._steps}"
        if reason := skipped(metrics):
            self.say(f"{name}  {reason}")
            return
        name = name.ljust(2 * len(str(self._steps)) + 6)
        now = time.monotonic()
        self._first = self._first or (step, now)
        self._evaluated |= {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if not self._every or (step % self._every and step < self._steps):
            return
        values = {**self._evaluated, **metrics}
        if not self._columns:
            all_columns = COLUMNS_OF_ACTING if ACTS in metrics else COLUMNS
            self._columns = [each for each in all_columns if each[0] != "cost/mean" or each[0] in metrics]
            headings = [heading.rjust(width) for _, heading, width, _ in self._columns]
            self.say("  ".join(["step".ljust(len(name)), *headings, "seconds".rjust(7), "left".rjust(7)]))
        cells = [_cell(values, metric, decimals).rjust(width) for metric, _, width, decimals in self._columns]
        self.say("  ".join([name, *cells, self._seconds(step, now).rjust(7), self._left(step, now).rjust(7)]))
        self._evaluated = {}
        self._last = (step, now)

    def progress(self, text: str) -> None:
        self._waits += bool(text)
        if self._every and self._waits >= self._next_wait:
            self._waits = 0
            self._next_wait = min(2 * self._next_wait, MOST_WAITS)
            self.say(text)

    def _seconds(self, step: int, now: float) -> str:
        """Returns how long a step took since the line before."""
        last, then = self._last or (step, now)
        return _number((now - then) / (step - last), 2) if step > last else "-"

    def _left(self, step: int, now: float) -> str:
        """Estimates the time left from the pace since the first step shown, which in a resumed run is not step 1."""
        first, began = self._first or (step, now)
        if step <= first:
            return "-"
        seconds = (now - began) / (step - first) * (self._steps - step)
        return (
            f"{seconds:.0f} s"
            if seconds < 100
            else f"{seconds / 60:.0f} min"
            if seconds < 6000
            else f"{seconds / 3600:.1f} h"
        )


def _cell(metrics: Metrics, metric: str, decimals: int) -> str:
    """Returns a number of the table, with its spread if it is the reward."""
    spread = f" ± {_number(metrics.get('reward/std'), decimals)}" if metric == "reward/mean" else ""
    return f"{_number(metrics.get(metric), decimals)}{spread}"


def _number(value: Any, decimals: int) -> str:
    """Returns a number in at most eight characters; "-" for what is none."""
    if not isinstance(value, float | int):
        return "-"
    return f"{value:.{decimals}f}" if abs(value) < 1000 else f"{value:.0f}" if abs(value) < 1e6 else f"{value:.1e}"


class LiveDisplay(Display):
    """Redraws a progress bar, the numbers of the last step and one of its samples in place."""

    def __init__(self, console: Console, steps: int, workers: Mapping[str, int] = NO_WORKERS) -> None:
        self._load = ServiceLoad(workers)
        self._rewards = LongCurve()
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._bar = self._progress.add_task("steps", total=steps)
        self._last_step: list[RenderableType] = []
        self._terminal_is_gone = False
        self._echo: list[Any] | None = None
        self._live = Live(self._progress, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._echo = _hide_control_characters()
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()
        _set_terminal(self._echo)

    def settle(self) -> None:
        with self._while_there_is_a_terminal():
            self._live.stop()

    @contextmanager
    def _while_there_is_a_terminal(self) -> Iterator[None]:
        """Ends the output when the terminal was closed; the run ends in order."""
        try:
            yield
        except OSError:
            self._terminal_is_gone = True

    def say(self, text: str) -> None:
        if self._terminal_is_gone:
            return
        with self._while_there_is_a_terminal():
            self._live.console.print(Text(text), soft_wrap=True)  # A command that is printed can be copied.

    def step(self, metrics: Metrics, sample: SampleRecord | None) -> None:
        self._progress.update(self._bar, completed=int(metrics["version"]))
        if reason := skipped(metrics):
            self.say(f"step {metrics['step']}: {reason}")
        table = _number_table(shown(metrics), self._live.console.width)
        panels = [] if sample is None else [sample_panel(sample, SHOWN_CHARACTERS)]
        self._last_step = [table, *self._course(metrics), *panels]
        self.progress("")

    def _course(self, metrics: Metrics) -> Iterator[RenderableType]:
        """Yields the curve of the reward, who waits for whom, and what the run waits for."""
        self._load.observe(metrics)
        name, metric = ("return ", "acting/return_last20") if ACTS in metrics else ("reward ", "reward/mean")
        if isinstance(reward := metrics.get(metric), float | int):
            self._rewards.add(reward)
        if curve := self._rewards.line(self._live.console.width - len(name)):
            yield Text.assemble((name, "dim"), curve)
        for line in self._load.lines():
            yield Items(line.split(", "), ", ", "dim")
        if slowest := self._load.bottleneck():
            yield Text(slowest, "yellow")

    def progress(self, text: str) -> None:
        if self._terminal_is_gone:
            return
        between = [Items(text.split(", "), ", ", "dim")] if text else []
        with self._while_there_is_a_terminal():
            self._live.update(Group(self._progress, *between, *self._last_step))


def _number_table(pairs: Sequence[tuple[str, str]], width: int) -> Table:
    """Returns a grid of names and numbers, in at most four columns and as many as fit without a broken line."""
    rows = [pairs]
    for columns in range(4, 0, -1):
        rows = [pairs[start : start + columns] for start in range(0, len(pairs), columns)]
        ways = (pairs[place::columns] for place in range(columns))
        longest = [max((len(f"{name} {number}") for name, number in column), default=0) for column in ways]
        if sum(longest) + 2 * (columns - 1) <= width:
            break
    table = Table.grid(padding=(0, 2), expand=True)
    for row in rows:
        table.add_row(*(Text.assemble((f"{name} ", "dim"), number) for name, number in row))
    return table


def _hide_control_characters() -> list[Any] | None:
    """Keeps the terminal from echoing ^C, which would shift the live view by a line and leave a part of it behind.
    Returns the settings before; None where the input is no terminal."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError, OSError, AttributeError):  # A pipe, a closed or a replaced input.
        return None
    _set_terminal([*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]])
    return before


def _set_terminal(settings: list[Any] | None) -> None:
    if settings is not None:
        with suppress(termios.error, OSError):  # The terminal was closed.
            termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)


def skipped(metrics: Metrics) -> str:
    """Returns that the step trained nothing, and why; "" when it trained."""
    reason = next((name.removeprefix("skipped/") for name in metrics if name.startswith("skipped/")), "")
    return f"trained nothing ({reason}): it is tried again with other samples" if reason else ""


def shown(metrics: Metrics) -> list[tuple[str, str]]:
    """Returns the names on the screen and the formatted numbers of the metrics of SHOWN, or SHOWN_OF_ACTING, that
    exist."""
    return [
        (name, format(metrics[metric], form))
        for metric, name, form in (SHOWN_OF_ACTING if ACTS in metrics else SHOWN)
        if isinstance(metrics.get(metric), float | int)
    ]


# Shows a running run in a notebook: one output of a cell with a bar and the last numbers, replaced at each step.


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
