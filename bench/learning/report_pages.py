"""Writes docs/learning.md with its plots, and the page of full tables beside the results, from the results alone."""

import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from asyncrl.bench.learning.grid import SYNCHRONOUS, Candidate, Grid, Results, Table
from asyncrl.bench.learning.paired_statistics import differences, recovered_share, upper_bound
from asyncrl.bench.learning.plots import plots
from asyncrl.bench.learning.result_cells import Cell, cells, ranking, results_in_grid
from asyncrl.bench.measurements import LOADED
from asyncrl.experiments import experiments

PLOTS = "learning"
"""Folder of the plots, beside docs/learning.md."""
SHOWN_PLOTS = ("curves", "reward")
"""Kinds of plots in docs/learning.md; those of deciles are beside the full tables only."""
TABLES = "bench/results/learning.md"
"""The page of full tables, seen from the folder above docs."""
NO_WORSE = 0.03
"""Bound of the loss at limit 2 below which asynchrony counts as no worse."""
LOSS = "loss at η"
TEXTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("report_pages.toml").read_text("utf-8"))


def write_pages(grid: Grid, results: Results, docs: Path) -> list[Path]:
    """Writes docs/learning.md, its plots below docs/learning, and the full tables to TABLES; returns their paths."""
    drawn = plots(grid, results)
    texts = {
        docs / "learning.md": "\n".join(summary_lines(grid, results, list(drawn))) + "\n",
        docs.parent / TABLES: "\n".join(table_lines(grid, results, list(drawn))) + "\n",
        **{docs / PLOTS / f"{name}.svg": chart for name, chart in drawn.items()},
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(texts)


def _opening(title: str, grid: Grid, results: Results) -> Iterator[str]:
    counted, runs = results_in_grid(grid, results)
    dates = sorted({str(line["date"]) for line in counted.values()})
    when = f"run {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}" if dates else "none run yet"
    yield f"# {title}"
    yield ""
    yield "Written by `asyncrl-bench learning` from `bench/results/learning.jsonl`; grid: `bench/learning/grid.toml`."
    yield f"{len(counted)} of {runs} runs, {when}."


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table, or that there is nothing."""
    if not rows:
        yield "nothing"
        return
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)


# ---- docs/learning.md ------------------------------------------------------------------------------------


def summary_lines(grid: Grid, results: Results, drawn: Sequence[str]) -> Iterator[str]:
    """Yields the lines of docs/learning.md. drawn: names of the plots that exist."""
    yield from _opening("Does it learn?", grid, results)
    yield f"Every row, with spreads, bounds and tokens trained by length: [full tables](../{TABLES}).\n"
    yield TEXTS["summary"].format(goal=grid.goal)
    yield from _claims(grid, results)
    for table in grid.tables:
        yield f"\n## {table.title}"
        found = {task: of_task for task in table.tasks if (of_task := cells(grid, table, task, results))}
        if len(table.tasks) > 1 and len(table.rows) == 1:
            yield from _by_task(found, table)
        else:
            for task, of_task in found.items():
                yield from _by_row(task, of_task, table)
        for name in drawn:
            if name.startswith(tuple(f"{table.name}-{task}-" for task in table.tasks)) and name.endswith(SHOWN_PLOTS):
                yield f"\n![{name}]({PLOTS}/{name}.svg)"
    yield from _not_run(grid, results)


def _by_task(found: dict[str, list[Cell]], table: Table) -> Iterator[str]:
    """Yields one line a task of a table that has a single row, and what the controls reached."""
    limits = [limit for limit in table.limits if limit != SYNCHRONOUS]
    head = ["task", "η = 0", *(f"loss at {limit} (bound)" for limit in limits), "steps to the goal", "controls"]
    yield ""
    yield from _markdown(head, [_task_line(task, of_task, table) for task, of_task in found.items()])


def _task_line(task: str, found: Sequence[Cell], table: Table) -> list[str]:
    own = {cell.limit: cell for cell in found if cell.row in table.rows}
    losses = {limit: cell.losses for limit, cell in sorted(own.items()) if limit != SYNCHRONOUS}
    return [
        task,
        f"{own[SYNCHRONOUS].reward.mean:.3f}" if SYNCHRONOUS in own else "",
        *(f"{fmean(lost):z.3f} ({upper_bound(lost):z.3f})" if lost else "" for lost in losses.values()),
        ", ".join(_steps_text(own[limit]) for limit in sorted(own)),
        _controls(found, table),
    ]


def _controls(found: Sequence[Cell], table: Table) -> str:
    return ", ".join(f"{cell.reward.mean:.3f}" for cell in found if cell.row not in table.rows)


def _by_row(task: str, found: Sequence[Cell], table: Table) -> Iterator[str]:
    """Yields one line a row: its seconds where its workers were processes, else its losses, at each limit."""
    own = [cell for cell in found if cell.row in table.rows]
    if not own:
        return
    limits = sorted({cell.limit for cell in own})
    synchronous = [line["held_out"] for cell in own for line in cell.synchronous.values()]
    compared = f", synchronous {fmean(synchronous):.3f}" if synchronous and SYNCHRONOUS not in limits else ""
    controls = _controls(found, table)
    yield f"\n`{task}`{compared}{f', controls {controls}' if controls else ''}\n"
    timed = all(cell.of_processes for cell in own)
    shown: Callable[[Cell], str] = _seconds if timed else _reward_or_loss
    at = {(cell.row, cell.limit): shown(cell) for cell in own}
    what = "seconds at η" if timed else LOSS
    head = [what, *(f"{limit}, held out" if what == LOSS and limit == SYNCHRONOUS else str(limit) for limit in limits)]
    rows = dict.fromkeys(cell.row for cell in own)
    yield from _markdown(head, [[row, *(at.get((row, limit), "") for limit in limits)] for row in rows])


def _reward_or_loss(cell: Cell) -> str:
    if cell.limit == SYNCHRONOUS or not cell.losses:
        return f"{cell.reward.mean:.3f}"
    return f"{fmean(cell.losses):z.3f}"


def _seconds(cell: Cell) -> str:
    if math.isinf(cell.to_goal("seconds")):
        return "never"
    runs = len(cell.lines)
    return f"{cell.to_goal('seconds'):.1f}" + (f" ({cell.reached} of {runs})" if cell.reached < runs else "")


def _not_run(grid: Grid, results: Results) -> Iterator[str]:
    """Yields what is missing and what failed; no line when every run is there."""
    keys: dict[tuple[str, str], set[str]] = {}
    for name, cases in grid.parts(results).items():
        for case in cases:
            keys.setdefault((name, case.task), set()).add(case.key(grid.defaults))
    there = {place: len(wanted & results.keys()) for place, wanted in keys.items()}
    rows = [
        (*place, f"{there[place]} of {len(wanted)}") for place, wanted in keys.items() if there[place] < len(wanted)
    ]
    if rows:
        yield "\n## Not run yet\n"
        yield from _markdown(("table", "task", "runs that are there"), rows)
    failed = [line for line in results_in_grid(grid, results)[0].values() if "failed" in line]
    if failed:
        yield "\nRuns that failed (`--again` runs them again):\n"
    for line in failed:
        last = line["failed"].splitlines()[-1]
        yield f"- {line['task']}, limit {line['limit']}, seed {line['seed']}, {line['values']}: {last}"


# ---- claims ----------------------------------------------------------------------------------------------


def _claims(grid: Grid, results: Results) -> Iterator[str]:
    yield "\n## Claims\n"
    yield f"**With its defaults asynchrony at η = 2 costs no reward** (bound of the loss under {NO_WORSE}):\n"
    (defaults,) = [table for table in grid.tables if table.name == "defaults"]
    findings: dict[str, list[str]] = {}
    for task in defaults.tasks:
        found = [cell for cell in cells(grid, defaults, task, results) if cell.limit == 2 and cell.row in defaults.rows]
        finding = no_worse(found[0], len(defaults.seeds)) if found else "not run"
        findings.setdefault(finding.partition(": mean")[0], []).append(task)
    yield from (f"- {finding}: {', '.join(tasks)}" for finding, tasks in findings.items())
    yield TEXTS["recovery"].format(limit=grid.claim.limit)
    if not grid.claim.is_searched(results):
        yield "The search is not complete, so no setting is chosen."
    elif (candidate := grid.claim.chosen(results)) is None:
        yield "No candidate loses enough without a correction, so there is no case to show it in."
    else:
        yield f"Chosen: {candidate.name}. The claim {recovery(grid, candidate, results)}."


def no_worse(cell: Cell, seeds: int) -> str:
    """Decides whether asynchrony with defaults loses reward; undecided until all pairs have results."""
    if len(cell.losses) < seeds:
        return f"not decided: {len(cell.losses)} of {seeds} pairs"
    bound = upper_bound(cell.losses)
    decision = "holds" if bound < NO_WORSE else "does not hold"
    mean_loss = f"mean loss {fmean(cell.losses):+.3f}, one-sided 95 % bound {bound:+.3f}"
    return f"{decision}: {mean_loss}, wanted under {NO_WORSE}"


def recovery(grid: Grid, candidate: Candidate, results: Results) -> str:
    """Decides how much of the loss the default correction recovers in the chosen setting."""
    claim = grid.claim
    synchronous, uncorrected = claim.rewards(claim.uncorrected_cases(candidate, claim.seeds), results)
    _, corrected = claim.rewards(claim.corrected_cases(candidate), results)
    complete = len(synchronous.keys() & uncorrected.keys() & corrected.keys())
    if complete < len(claim.seeds):
        return f"is not decided: {complete} of {len(claim.seeds)} seeds"
    lost, share = differences(synchronous, uncorrected), recovered_share(synchronous, uncorrected, corrected)
    if fmean(lost) < claim.least_loss:
        return f"does not hold: with these seeds the uncorrected run loses {fmean(lost):+.3f} only"
    decision = "holds" if share >= 0.5 else "does not hold"
    return f"{decision}: of a loss of {fmean(lost):.3f} the default correction recovers {share:.0%}, wanted half"


# ---- full tables -----------------------------------------------------------------------------------------


def table_lines(grid: Grid, results: Results, drawn: Sequence[str]) -> Iterator[str]:
    """Yields the lines of the page of full tables. drawn: names of the plots that exist."""
    yield from _opening("Results of the learning grid", grid, results)
    yield ""
    yield TEXTS["tables"].format(goal=grid.goal, loaded=LOADED)
    yield "\n## Tasks\n"
    described = experiments()
    tasks = dict.fromkeys(task for table in grid.tables for task in table.tasks)
    yield from (f"- `{task}`: {described[task]}" for task in tasks)
    if "two-turns" in tasks:
        yield f"\n{TEXTS['two_turns']}"
    for table in grid.tables:
        yield from _full_table(grid, table, results, drawn)
    yield from _search(grid, results)


def _full_table(grid: Grid, table: Table, results: Results, drawn: Sequence[str]) -> Iterator[str]:
    yield f"\n## {table.title}"
    if ranked := ranking(grid, table, results):
        listed = ", ".join(f"{row} {seen.mean:.3f} (lowest run {seen.lowest:.3f})" for row, seen in ranked)
        yield f"\nHeld out over all tasks, limits and seeds, of the rows that are complete: {listed}."
    by_task = {task: found for task in table.tasks if (found := cells(grid, table, task, results))}
    if not by_task:
        yield "\nNot run yet."
    for task, found in by_task.items():
        before = fmean(line["held_out_before"] for cell in found for line in cell.lines.values())
        yield f"\n### {task}\n\nHeld out before training: {before:.3f}.\n"
        yield from _markdown(HEAD, [columns(cell) for cell in found])
        mine = [name for name in drawn if name.startswith(f"{table.name}-{task}-")]
        yield from (f"\n![{name}](../../docs/{PLOTS}/{name}.svg)" for name in mine)


def _search(grid: Grid, results: Results) -> Iterator[str]:
    """Yields for each candidate its runs, the synchronous held-out reward and the loss at the large limit."""
    claim = grid.claim
    yield f"\n## Where does staleness hurt at η = {claim.limit}?"
    yield TEXTS["search"].format(reward=claim.least_reward, loss=claim.least_loss)
    rows = []
    for candidate in claim.candidates:
        synchronous, stale = claim.rewards(claim.uncorrected_cases(candidate, claim.search_seeds), results)
        lost = differences(synchronous, stale)
        runs = f"{len(synchronous) + len(stale)} of {2 * len(claim.search_seeds)}"
        at_zero = f"{fmean(synchronous.values()):.3f}" if synchronous else ""
        rows.append((candidate.name, runs, at_zero, f"{fmean(lost):+.3f}" if lost else ""))
    yield from _markdown(("candidate", "runs", "held out, η = 0", f"loss, η = {claim.limit}"), rows)


HEAD = (
    *("", "η", "seeds", "held out", "loss against η = 0", "steps to the goal", "seconds to the goal"),
    *("of that at η = 0", "tokens trained by decile, %", "age"),
)


def columns(cell: Cell) -> tuple[str, ...]:
    """Returns the text of a cell in the order of HEAD."""
    reward = cell.reward
    spread = "" if math.isnan(reward.deviation) else f" ± {reward.deviation:.3f}"
    cost = f", cost {fmean(cell.costs):.3f}" if cell.costs else ""
    seconds = f"{cell.to_goal('seconds'):.1f}" + ("*" if cell.loaded else "")
    return (
        cell.row,
        str(cell.limit),
        str(reward.seeds),
        f"{reward.mean:.3f}{spread}{cost}",
        _loss_text(cell),
        _steps_text(cell),
        _goal_text(cell, seconds) if cell.of_processes else "",
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
