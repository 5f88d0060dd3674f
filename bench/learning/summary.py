"""The page docs/learning.md: what the grid showed, short, with the plots; the full tables lie beside the results."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from asyncrl.bench.learning.grid import SYNCHRONOUS, Grid, Table
from asyncrl.bench.learning.paired_statistics import upper_bound
from asyncrl.bench.learning.tables import Cell, Results, cells, steps_text

SHOWN_PLOTS = ("curves", "reward")
"""Kinds of plots on the page; those of deciles are beside the full tables only."""

LOSS = "loss at η"

LEGEND = """\
Models have 0.3M parameters. `quickstart` spells words backwards; `longer` and `shorter` reward length; in `first-token`
the first token decides the reward; in `stragglers` at first one answer in twenty is ten times as long; in `two-turns`
the model writes both turns in one generation.

- A number at η = 0 is the **held-out reward** of the synchronous run: its last version on 64 prompts that were never
  trained on, four answers each at temperature 1, mean over seeds.
- A number at another η is the **loss**: the held-out reward of the synchronous run less that of the run with the same
  seed, mean over seeds. A *bound* is its one-sided 95 % bound.
- **Seconds** are the median time of training until the mean reward of five batches reaches {goal}, of runs in which
  each worker was a process. (k of n): only k runs of n reached the goal.
- One step is one update, so the ratio to *recomputed* log-probs is 1 and no bound of it acts.
- **Controls** must not learn: their held-out reward with a learning rate of 0 and with shuffled advantages."""


def summary(grid: Grid, results: Results, drawn: Sequence[str], claims: Sequence[str], plots: str) -> Iterator[str]:
    """Yields the lines of the page below its opening.

    Args:
        drawn: names of the plots that exist.
        claims: lines about the claims that the grid tests.
        plots: folder of the plots, seen from the page.
    """
    yield LEGEND.format(goal=grid.goal)
    yield from claims
    for table in grid.tables:
        yield f"\n## {table.title}"
        if len(table.tasks) > 1 and len(table.rows) == 1:
            yield from _by_task(grid, table, results)
        else:
            for task in table.tasks:
                yield from _by_row(task, cells(grid, table, task, results), table)
        for name in drawn:
            if name.startswith(tuple(f"{table.name}-{task}-" for task in table.tasks)) and name.endswith(SHOWN_PLOTS):
                yield f"\n![{name}]({plots}/{name}.svg)"


def _by_task(grid: Grid, table: Table, results: Results) -> Iterator[str]:
    """Yields one line a task of a table that has a single row, and what the controls reached."""
    found = {task: cells(grid, table, task, results) for task in table.tasks}
    limits = [limit for limit in table.limits if limit != SYNCHRONOUS]
    head = ["task", "η = 0", *(f"loss at {limit} (bound)" for limit in limits), "steps to the goal", "controls"]
    yield ""
    yield from markdown(head, [_task_line(task, of_task, table) for task, of_task in found.items() if of_task])


def _task_line(task: str, found: Sequence[Cell], table: Table) -> list[str]:
    own = {cell.limit: cell for cell in found if cell.row in table.rows}
    controls = [cell.reward.mean for cell in found if cell.row not in table.rows]
    return [
        task,
        f"{own[SYNCHRONOUS].reward.mean:.3f}" if SYNCHRONOUS in own else "",
        *(_loss_with_bound(own[limit]) for limit in sorted(own) if limit != SYNCHRONOUS),
        ", ".join(steps_text(own[limit]) for limit in sorted(own)),
        ", ".join(f"{reward:.3f}" for reward in controls),
    ]


def _by_row(task: str, found: Sequence[Cell], table: Table) -> Iterator[str]:
    """Yields one line a row: its seconds where its workers were processes, else its losses, at each limit."""
    own = [cell for cell in found if cell.row in table.rows]
    if not own:
        return
    synchronous = [line["held_out"] for cell in own for line in cell.synchronous.values()]
    limits = sorted({cell.limit for cell in own})
    yield f"\n`{task}`{_compared_with(synchronous, limits)}{_controls(found, table)}\n"
    if all(cell.of_processes for cell in own):
        yield from _pivot(own, limits, "seconds at η", _seconds)
    else:
        yield from _pivot(own, limits, LOSS, _reward)


def _compared_with(synchronous: Sequence[float], limits: Sequence[int]) -> str:
    if SYNCHRONOUS in limits or not synchronous:
        return ""
    return f", synchronous {fmean(synchronous):.3f}"


def _controls(found: Sequence[Cell], table: Table) -> str:
    ends = [f"{cell.reward.mean:.3f}" for cell in found if cell.row not in table.rows]
    return f", controls {', '.join(ends)}" if ends else ""


def _pivot(own: Sequence[Cell], limits: Sequence[int], what: str, shown: Callable[[Cell], str]) -> Iterator[str]:
    at = {(cell.row, cell.limit): shown(cell) for cell in own}
    rows = dict.fromkeys(cell.row for cell in own)
    head = [what, *(f"{limit}, held out" if what == LOSS and limit == SYNCHRONOUS else str(limit) for limit in limits)]
    yield from markdown(head, [[row, *(at.get((row, limit), "") for limit in limits)] for row in rows])


def _reward(cell: Cell) -> str:
    if cell.limit == SYNCHRONOUS or not cell.losses:
        return f"{cell.reward.mean:.3f}"
    return f"{fmean(cell.losses):z.3f}"


def _loss_with_bound(cell: Cell) -> str:
    return f"{fmean(cell.losses):z.3f} ({upper_bound(cell.losses):z.3f})" if cell.losses else ""


def _seconds(cell: Cell) -> str:
    if math.isinf(cell.to_goal("seconds")):
        return "never"
    runs = len(cell.lines)
    return f"{cell.to_goal('seconds'):.1f}" + (f" ({cell.reached} of {runs})" if cell.reached < runs else "")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table, or that there is nothing."""
    if not rows:
        yield "nothing"
        return
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)
