"""Writes docs/learning.md with its plots, and the full tables beside the results, from the results alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from asyncrl.bench.learning.grid import Grid, Table
from asyncrl.bench.learning.plots import plots
from asyncrl.bench.learning.summary import markdown, summary
from asyncrl.bench.learning.tables import (
    HEAD,
    NO_WORSE,
    Line,
    Results,
    cells,
    columns,
    held_out,
    no_worse,
    ranking,
    recovery,
    searched,
)
from asyncrl.bench.measurements import LOADED
from asyncrl.experiments import experiments

PLOTS = "learning"
"""Folder of the plots, beside docs/learning.md."""
TABLES = "bench/results/learning.md"
"""The page of full tables, seen from the folder above docs."""

LEGEND = """\
- **held out**: mean reward of the last version on 64 prompts that were never trained on, 4 answers each at
  temperature 1; mean over seeds ± standard deviation; with Safe-RLHF also their mean cost, 1 for an answer that
  copies the word (its limit is in bench/learning/grid.toml). DAPO's punishment of overlong answers is part of its own.
- **loss**: held-out reward of the synchronous run (η = 0) of the same seed less that of this one, mean, with the
  one-sided 95 % bound (Student's t over pairs). The synchronous run is of the same row where the table has η = 0,
  and of GRPO's or PPO's defaults elsewhere.
- **steps, seconds to the goal**: of training, until the mean reward of five batches reaches {goal}; median over all
  runs, of which one that never does is the longest. The answers of a batch are `age` versions old, so a larger limit
  sees the goal so many steps late; and DAPO's batches hold no group of equal rewards, so its steps stand beside no
  others. Seconds only where each worker was a process of its own: most runs are a fleet in one process, two runs on
  two cores, and their wall clock tells nothing. A star: others used over {loaded:.0%} of the machine, or how
  much was not measured.
- **of that at η = 0**: seconds to the goal over those of the synchronous run, as of *loss*, from the least to the most
  of the pairs in which both got there; in brackets how many did, when not all. A star: some pairs are of two
  revisions, so of two sessions, whose speeds differed by up to a third.
- **tokens trained by decile**: share of the sampled tokens that entered the loss with a weight over 0, shortest answers
  first, over windows of 1,024 samples; with a mask or a rejection over the seeds of which it is known. **age**: mean
  staleness of trained tokens, in versions.
- A step is one update here, so the ratio to *recomputed* log-probs is 1 and no bound of it acts: such rows, and the
  preset `gspo`, which brings them, differ in what becomes of the weight alone. At η = 0 the ratio to the engine is 1,
  too, and what differs in the presets' losses is next to nothing.
- `learning rate 0` and `shuffled advantages` are controls that must not learn."""

TWO_TURNS = """\
`two-turns` is one generation: the model writes the mark of the second turn itself, and one advantage covers both.
Generation that begins again after somebody else's turn does not exist here yet."""

RECOVERY = """
**Where staleness hurts at η = {limit}, the default correction recovers at least half of the loss**, in a setting that
uncorrected runs choose."""

SEARCH = """
The setting is the first of these candidates whose synchronous run reaches {reward} and that loses at least {loss}
without a correction; seeds of their own choose it.
"""


def write_report(grid: Grid, results: Results, docs: Path) -> list[Path]:
    """Writes the summary docs/learning.md, its plots below docs/learning, and the full tables to TABLES.

    Returns the paths of the files written.
    """
    drawn = plots(grid, results)
    folder, tables = docs / PLOTS, docs.parent / TABLES
    for each in (folder, tables.parent):
        each.mkdir(parents=True, exist_ok=True)
    for name, chart in drawn.items():
        (folder / f"{name}.svg").write_text(chart)
    (docs / "learning.md").write_text("\n".join(summary_lines(grid, results, list(drawn))) + "\n")
    tables.write_text("\n".join(table_lines(grid, results, list(drawn))) + "\n")
    return [docs / "learning.md", tables, *(folder / f"{name}.svg" for name in drawn)]


def summary_lines(grid: Grid, results: Results, drawn: Sequence[str]) -> Iterator[str]:
    """Yields the lines of docs/learning.md. drawn: names of the plots that exist."""
    yield from _opening("Does it learn?", grid, results)
    yield f"Every row, with spreads, bounds and tokens trained by length: [full tables](../{TABLES}).\n"
    yield from summary(grid, results, drawn, list(_claims(grid, results)), PLOTS)
    yield from _not_run(grid, results)


def table_lines(grid: Grid, results: Results, drawn: Sequence[str]) -> Iterator[str]:
    """Yields the lines of the page of full tables. drawn: names of the plots that exist."""
    yield from _opening("Results of the learning grid", grid, results)
    yield ""
    yield LEGEND.format(goal=grid.goal, loaded=LOADED)
    yield from _tasks(grid)
    for table in grid.tables:
        yield from _table(grid, table, results, drawn)
    yield from _search(grid, results)


def _opening(title: str, grid: Grid, results: Results) -> Iterator[str]:
    here = _in_grid(grid, results)
    dates = sorted({str(line["date"]) for line in here.values()})
    when = f"run {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}" if dates else "none run yet"
    yield f"# {title}"
    yield ""
    yield "Written by `asyncrl-bench learning` from `bench/results/learning.jsonl`; grid: `bench/learning/grid.toml`."
    yield f"{len(here)} of {len(_keys(grid, results))} runs, {when}."


def _tasks(grid: Grid) -> Iterator[str]:
    yield "\n## Tasks\n"
    told = experiments()
    tasks = dict.fromkeys(task for table in grid.tables for task in table.tasks)
    yield from (f"- `{task}`: {told[task]}" for task in tasks)
    if "two-turns" in tasks:
        yield f"\n{TWO_TURNS}"


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
    yield from _recovery_claim(grid, results)


def _recovery_claim(grid: Grid, results: Results) -> Iterator[str]:
    claim = grid.claim
    yield RECOVERY.format(limit=claim.limit)
    rewards = held_out(results)
    if not claim.is_searched(rewards, grid.defaults):
        yield "The search is not complete, so no setting is chosen."
    elif (candidate := claim.chosen(rewards, grid.defaults)) is None:
        yield "No candidate loses enough without a correction, so there is no case to show it in."
    else:
        yield f"Chosen: {candidate.name}. The claim {recovery(grid, candidate, results)}."


def _search(grid: Grid, results: Results) -> Iterator[str]:
    claim = grid.claim
    yield f"\n## Where does staleness hurt at η = {claim.limit}?"
    yield SEARCH.format(reward=claim.least_reward, loss=claim.least_loss)
    yield from markdown(("candidate", "runs", "held out, η = 0", f"loss, η = {claim.limit}"), searched(grid, results))


def _table(grid: Grid, table: Table, results: Results, drawn: Sequence[str]) -> Iterator[str]:
    yield f"\n## {table.title}"
    if ranked := ranking(grid, table, results):
        told = ", ".join(f"{row} {seen.mean:.3f} (lowest run {seen.lowest:.3f})" for row, seen in ranked)
        yield f"\nHeld out over all tasks, limits and seeds, of the rows that are complete: {told}."
    by_task = {task: found for task in table.tasks if (found := cells(grid, table, task, results))}
    if not by_task:
        yield "\nNot run yet."
    for task, found in by_task.items():
        before = fmean(line["held_out_before"] for cell in found for line in cell.lines.values())
        yield f"\n### {task}\n\nHeld out before training: {before:.3f}.\n"
        yield from markdown(HEAD, [columns(cell) for cell in found])
        mine = [name for name in drawn if name.startswith(f"{table.name}-{task}-")]
        yield from (f"\n![{name}](../../docs/{PLOTS}/{name}.svg)" for name in mine)


def _not_run(grid: Grid, results: Results) -> Iterator[str]:
    """Yields what is missing and what failed; no line when every run is there."""
    rows = []
    for name, cases in grid.parts(held_out(results)).items():
        by_task: dict[str, set[str]] = {}
        for case in cases:
            by_task.setdefault(case.task, set()).add(case.key(grid.defaults))
        for task, of_task in by_task.items():
            there = len(of_task & results.keys())
            if there < len(of_task):
                rows.append((name, task, f"{there} of {len(of_task)}"))
    if rows:
        yield "\n## Not run yet\n"
        yield from markdown(("table", "task", "runs that are there"), rows)
    failed = {key: line for key, line in _in_grid(grid, results).items() if "failed" in line}
    if failed:
        yield "\nRuns that failed (`--again` runs them again):\n"
    for line in failed.values():
        last = line["failed"].splitlines()[-1]
        yield f"- {line['task']}, limit {line['limit']}, seed {line['seed']}, {line['values']}: {last}"


def _keys(grid: Grid, results: Results) -> set[str]:
    parts = grid.parts(held_out(results))
    return {case.key(grid.defaults) for cases in parts.values() for case in cases}


def _in_grid(grid: Grid, results: Results) -> Mapping[str, Line]:
    """Results of what the grid is now: a changed setting leaves lines behind that count for nothing."""
    keys = _keys(grid, results)
    return {key: line for key, line in results.items() if key in keys}
