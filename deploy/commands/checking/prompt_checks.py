"""Says what the sources of an experiment's prompts have: rows, columns, and columns that its rewards lack."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from asyncrl.config.schema import IN_MEMORY, Config, RewardFunction
from asyncrl.deploy.checks.folder_contents import here
from asyncrl.deploy.checks.machine import Check
from asyncrl.deploy.checks.run_prompts import refuse_marks
from asyncrl.errors import ConfigError, TaskError
from asyncrl.protocols.named_columns import missing_column
from asyncrl.rewards.templates import exact_match, math_verify, numeric
from asyncrl.tasks.prompt_rows import PromptRows
from asyncrl.tasks.prompt_sources import held_out_prompts, training_prompts
from asyncrl.tasks.source_problems import CHECKED_ROWS, is_read_ahead

COMPARING = {template.__name__: "answer" for template in (exact_match, numeric, math_verify)}
"""Templates that read a column, with its default."""


def prompt_checks(config: Config) -> Iterator[Check]:
    """Reads small files and folders of rows; sources that take code, a download or long are only named."""
    scored = [*config.reward.functions, *config.cost.functions]
    refuse = partial(refuse_marks, config, model=here(config.model))
    yield from _source_checks(
        "task.prompts", [each.use for each in config.task.sources], partial(training_prompts, config), scored, refuse
    )
    for each in config.evaluate.held_out:
        read = partial(held_out_prompts, config, name=each.name)
        yield from _source_checks(f"{each.section}.prompts", [each.prompts], read, each.functions or scored, refuse)


def _source_checks(
    key: str,
    specs: Sequence[str],
    read: Callable[[], PromptRows | None],
    functions: Sequence[RewardFunction],
    refuse: Callable[[Mapping[str, PromptRows]], None],
) -> Iterator[Check]:
    unread = [spec for spec in specs if spec != IN_MEMORY and not is_read_ahead(spec)]
    if unread:
        remedy = f"nothing here has looked at its rows: `asyncrl try` reads them, and so does the run ({key})"
        yield Check("prompts", "note", f"{', '.join(unread)} is not read yet", remedy)
        return
    try:
        prompts = read()
        if prompts is None:
            return
        yield Check("prompts", "ok", f"{prompts.source}: {len(prompts)} rows, columns {_columns(prompts)}")
        for note in prompts.notes:
            yield Check("prompts", "ok", note)
        yield from _missing_columns(prompts, functions)
    except (TaskError, ConfigError):
        return  # The checks before this one say what is wrong with the source.
    try:
        refuse({key: prompts})
    except TaskError as error:
        yield Check("prompts", "bad", str(error))


def _columns(prompts: PromptRows) -> str:
    return ", ".join(prompts.row(0).columns)


def _missing_columns(prompts: PromptRows, functions: Sequence[RewardFunction]) -> Iterator[Check]:
    """Yields the templates whose column no row has, of those that are looked at."""
    rows = [prompts.row(number).columns for number in range(min(len(prompts), CHECKED_ROWS))]
    for function in functions:
        if function.use not in COMPARING:
            continue
        column = str(function.options.get("column", COMPARING[function.use]))
        if not any(column in row for row in rows):
            text = f"{prompts.where(0)}: {function.use} needs the column {column}: {missing_column(column, rows[0])}"
            yield Check("prompts", "bad", text, f'write task.columns = {{ {column} = "COLUMN OF YOURS" }}')
