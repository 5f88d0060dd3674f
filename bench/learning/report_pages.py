"""Writes docs/learning.md with its plots, and the page of full tables beside the results, from the results alone.

The text of the pages stands in summary_page.md.j2 and tables_page.md.j2; this file decides the claims and makes tables.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from asyncrl.bench.learning.grid import SYNCHRONOUS, Candidate, Claim, Grid, Results, Table
from asyncrl.bench.learning.plots import TEMPLATES, plots
from asyncrl.bench.learning.result_cells import Cell, cells, ranking, results_in_grid
from asyncrl.bench.measurements import LOADED, differences, recovered_share, upper_bound
from asyncrl.config.sources.packaged_experiments import experiments

PLOTS = "learning"
"""Folder of the plots, beside docs/learning.md."""
TABLES = "bench/results/learning.md"
"""The page of full tables, seen from the folder above docs."""
NO_WORSE = 0.03
"""Bound of the loss at limit 2 below which asynchrony counts as no worse."""


def write_pages(grid: Grid, results: Results, docs: Path) -> list[Path]:
    """Writes docs/learning.md, its plots below docs/learning, and the full tables to TABLES; returns their paths."""
    drawn = plots(grid, results)
    texts = {
        docs / "learning.md": page("summary_page.md.j2", grid, results, list(drawn)),
        docs.parent / TABLES: page("tables_page.md.j2", grid, results, list(drawn)),
        **{docs / PLOTS / f"{name}.svg": chart for name, chart in drawn.items()},
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(texts)


def page(template: str, grid: Grid, results: Results, drawn: Sequence[str]) -> str:
    """Returns the text of a page. drawn: names of the plots that exist."""
    counted, runs = results_in_grid(grid, results)
    dates = sorted({str(line["date"]) for line in counted.values()})
    tasks = {task: experiments()[task] for table in grid.tables for task in table.tasks}
    of_table = {
        table.name: {task: found for task in table.tasks if (found := cells(grid, table, task, results))}
        for table in grid.tables
    }
    constants = {"tables_page": TABLES, "plots_folder": PLOTS, "no_worse_bound": NO_WORSE, "loaded": LOADED}
    functions = {"by_task": _by_task, "by_row": _by_row, "beside": _beside, "own": _own, "full_table": _full_table}
    return TEMPLATES.get_template(template).render(
        **{**constants, **functions, "grid": grid, "results": results, "drawn": drawn, "tasks": tasks},
        counted=counted,
        runs=runs,
        when=f"run {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}" if dates else "none run yet",
        cells=of_table,
        findings=_findings(grid, of_table["defaults"]),
        chosen=grid.claim.chosen(results),
        recovery=recovery,
        missing=_missing(grid, results),
        ranking=partial(ranking, grid, results=results),
        search=_search(grid.claim, results),
        mean=fmean,
        markdown=_markdown,
    )


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, or that there is nothing."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) if rows else "nothing"


# ---- docs/learning.md ------------------------------------------------------------------------------------


def _by_task(table: Table, found: dict[str, list[Cell]]) -> str:
    """Returns one line a task of a table that has a single row, and what the controls reached."""
    limits = [limit for limit in table.limits if limit != SYNCHRONOUS]
    head = ["task", "η = 0", *(f"loss at {limit} (bound)" for limit in limits), "steps to the goal", "controls"]
    return _markdown(head, [_task_line(task, of_task, table) for task, of_task in found.items()])


def _task_line(task: str, found: Sequence[Cell], table: Table) -> list[str]:
    own = {cell.limit: cell for cell in _own(table, found)}
    losses = {limit: cell.losses for limit, cell in sorted(own.items()) if limit != SYNCHRONOUS}
    return [
        task,
        f"{fmean(own[SYNCHRONOUS].rewards):.3f}" if SYNCHRONOUS in own else "",
        *(f"{fmean(lost):z.3f} ({upper_bound(lost):z.3f})" if lost else "" for lost in losses.values()),
        ", ".join(_steps_text(own[limit]) for limit in sorted(own)),
        _controls(table, found),
    ]


def _own(table: Table, found: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in found if cell.row in table.rows]


def _controls(table: Table, found: Sequence[Cell]) -> str:
    return ", ".join(f"{fmean(cell.rewards):.3f}" for cell in found if cell.row not in table.rows)


def _beside(table: Table, found: Sequence[Cell]) -> str:
    """Returns what a table by row is compared with: the synchronous reward, unless a row has it, and the controls."""
    own = _own(table, found)
    controls = _controls(table, found)
    synchronous = [line["held_out"] for cell in own for line in cell.synchronous.values()]
    alone = synchronous and all(cell.limit != SYNCHRONOUS for cell in own)
    compared = f", synchronous {fmean(synchronous):.3f}" if alone else ""
    return compared + (f", controls {controls}" if controls else "")


def _by_row(own: Sequence[Cell]) -> str:
    """Returns one line a row: its seconds where its workers were processes, else its losses, at each limit."""
    timed = all(cell.of_processes for cell in own)
    at = {(cell.row, cell.limit): _seconds_text(cell) if timed else _reward_or_loss(cell) for cell in own}
    limits = sorted({cell.limit for cell in own})
    synchronous = "0" if timed else "0, held out"
    head = ["seconds at η" if timed else "loss at η", *(str(limit) if limit else synchronous for limit in limits)]
    rows = dict.fromkeys(cell.row for cell in own)
    return _markdown(head, [[row, *(at.get((row, limit), "") for limit in limits)] for row in rows])


def _reward_or_loss(cell: Cell) -> str:
    shown = cell.rewards if cell.limit == SYNCHRONOUS or not cell.losses else cell.losses
    return f"{fmean(shown):z.3f}"


def _missing(grid: Grid, results: Results) -> list[tuple[str, str, str]]:
    """Returns table, task and count of the runs that are there, where some are not."""
    keys: dict[tuple[str, str], set[str]] = {}
    for name, cases in grid.parts(results).items():
        for case in cases:
            keys.setdefault((name, case.task), set()).add(case.key(grid.defaults))
    left = {place: wanted for place, wanted in keys.items() if not wanted <= results.keys()}
    return [(*place, f"{len(wanted & results.keys())} of {len(wanted)}") for place, wanted in left.items()]


# ---- claims ----------------------------------------------------------------------------------------------


def _findings(grid: Grid, found: dict[str, list[Cell]]) -> dict[str, list[str]]:
    """Returns the tasks of each finding whether asynchrony with its defaults loses reward."""
    (defaults,) = [table for table in grid.tables if table.name == "defaults"]
    findings: dict[str, list[str]] = {}
    for task in defaults.tasks:
        stale = [cell for cell in _own(defaults, found.get(task, [])) if cell.limit == 2]
        finding = no_worse(stale[0], len(defaults.seeds)) if stale else "not run"
        findings.setdefault(finding.partition(": mean")[0], []).append(task)
    return findings


def no_worse(cell: Cell, seeds: int) -> str:
    """Decides whether asynchrony with defaults loses reward; undecided until all pairs have results."""
    if len(cell.losses) < seeds:
        return f"not decided: {len(cell.losses)} of {seeds} pairs"
    bound = upper_bound(cell.losses)
    decision = "holds" if bound < NO_WORSE else "does not hold"
    mean_loss = f"mean loss {fmean(cell.losses):+.3f}, one-sided 95 % bound {bound:+.3f}"
    return f"{decision}: {mean_loss}, wanted under {NO_WORSE}"


def recovery(claim: Claim, candidate: Candidate, results: Results) -> str:
    """Decides how much of the loss the default correction recovers in the chosen setting."""
    synchronous, uncorrected = claim.rewards(claim.uncorrected_cases(candidate, claim.seeds), results)
    _, corrected = claim.rewards(claim.corrected_cases(candidate), results)
    complete = len(synchronous.keys() & uncorrected.keys() & corrected.keys())
    if complete < len(claim.seeds):
        return f"is not decided: {complete} of {len(claim.seeds)} seeds"
    lost = differences(synchronous, uncorrected)
    share = recovered_share(synchronous, uncorrected, corrected)
    if fmean(lost) < claim.least_loss:
        return f"does not hold: with these seeds the uncorrected run loses {fmean(lost):+.3f} only"
    decision = "holds" if share >= 0.5 else "does not hold"
    return f"{decision}: of a loss of {fmean(lost):.3f} the default correction recovers {share:.0%}, wanted half"


def _search(claim: Claim, results: Results) -> str:
    """Returns for each candidate its runs, the synchronous held-out reward and the loss at the large limit."""
    rows = []
    for candidate in claim.candidates:
        synchronous, stale = claim.rewards(claim.uncorrected_cases(candidate, claim.search_seeds), results)
        lost = differences(synchronous, stale)
        runs = f"{len(synchronous) + len(stale)} of {2 * len(claim.search_seeds)}"
        at_zero = f"{fmean(synchronous.values()):.3f}" if synchronous else ""
        rows.append((candidate.name, runs, at_zero, f"{fmean(lost):+.3f}" if lost else ""))
    return _markdown(("candidate", "runs", "held out, η = 0", f"loss, η = {claim.limit}"), rows)


# ---- full tables -----------------------------------------------------------------------------------------

HEAD = (
    *("", "η", "seeds", "held out", "loss against η = 0", "steps to the goal", "seconds to the goal"),
    *("of that at η = 0", "tokens trained by decile, %", "age"),
)


def _full_table(found: Sequence[Cell]) -> str:
    before = fmean(line["held_out_before"] for cell in found for line in cell.lines.values())
    return f"Held out before training: {before:.3f}.\n\n" + _markdown(HEAD, [columns(cell) for cell in found])


def columns(cell: Cell) -> tuple[str, ...]:
    """Returns the text of a cell in the order of HEAD."""
    spread = f" ± {stdev(cell.rewards):.3f}" if len(cell.rewards) > 1 else ""
    cost = f", cost {fmean(cell.costs):.3f}" if cell.costs else ""
    return (
        cell.row,
        str(cell.limit),
        str(len(cell.rewards)),
        f"{fmean(cell.rewards):.3f}{spread}{cost}",
        _loss_text(cell),
        _steps_text(cell),
        _seconds_text(cell, "*" if cell.loaded else "") if cell.of_processes else "",
        _shares_text(cell),
        " ".join(f"{100 * share:.0f}" for share in cell.trained_by_decile),
        f"{fmean(line['staleness_mean'] for line in cell.lines.values()):.2f}",
    )


def _loss_text(cell: Cell) -> str:
    """Shows the mean and the one-sided 95 % bound; empty for a synchronous run."""
    if cell.limit == SYNCHRONOUS or not cell.losses:
        return ""
    bound = upper_bound(cell.losses)
    return f"{fmean(cell.losses):+.3f}" + (f" (< {bound:+.3f})" if math.isfinite(bound) else "")


def _steps_text(cell: Cell) -> str:
    return _goal_text(cell, f"{cell.to_goal('steps'):.0f}")


def _seconds_text(cell: Cell, star: str = "") -> str:
    return _goal_text(cell, f"{cell.to_goal('seconds'):.1f}{star}")


def _goal_text(cell: Cell, median_text: str) -> str:
    """Shows the median, and how many runs reached the goal if not all did."""
    runs = len(cell.lines)
    shown = "never" if math.isinf(cell.to_goal("steps")) else median_text
    return shown + (f" ({cell.reached} of {runs})" if 0 < cell.reached < runs else "")


def _shares_text(cell: Cell) -> str:
    """Shows the range over pairs in which both runs reached the goal, and how many if not all did."""
    if cell.limit == SYNCHRONOUS or not cell.of_processes or not (shares := cell.time_shares):
        return ""
    mixed = any(line["revision"] != synchronous["revision"] for line, synchronous in cell.pairs)
    shown = f"{min(shares):.2f} to {max(shares):.2f}" + ("*" if mixed else "")
    return shown + (f" ({len(shares)} of {len(cell.pairs)})" if len(shares) < len(cell.pairs) else "")
