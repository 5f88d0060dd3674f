"""Says what the sources of an experiment's prompts have, rows and columns, and tries its rewards on them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from asyncrl.config.schema import IN_MEMORY, Config
from asyncrl.deploy.checks.machine import Check
from asyncrl.deploy.checks.model_checks import here
from asyncrl.deploy.checks.run_prompts import refuse_long_prompts, refuse_marks, refuse_unreadable
from asyncrl.engines.models.model_folder import is_complete
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks.prompt_rows import PromptRows
from asyncrl.tasks.prompt_sources import held_out_prompts, training_prompts
from asyncrl.tasks.reward_trial import try_rewards
from asyncrl.tasks.source_problems import is_read_ahead


def prompt_checks(config: Config, *, counts: bool = True) -> Iterator[Check]:
    """Reads small files and folders of rows; sources that take code, a download or long are only named. counts: whether
    tokens of prompts are counted, for which the model has to be in order."""
    model = here(config.model)
    refuse_prompts = refuse_unreadable if is_complete(model) else refuse_marks

    def refuse(sets: Mapping[str, PromptRows]) -> list[str]:
        refuse_prompts(config, sets, model)
        if counts:
            refuse_long_prompts(config, sets, model)
        return asyncio.run(try_rewards(config, sets))

    sources = [each.use for each in config.task.sources]
    yield from _source_checks("task.prompts", sources, partial(training_prompts, config), refuse)
    for each in config.evaluate.held_out:
        read = partial(held_out_prompts, config, name=each.name)
        yield from _source_checks(f"{each.section}.prompts", [each.prompts], read, refuse)


def _source_checks(
    key: str,
    specs: Sequence[str],
    read: Callable[[], PromptRows | None],
    refuse: Callable[[Mapping[str, PromptRows]], list[str]],
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
    except (TaskError, ConfigError):
        return  # The checks before this one say what is wrong with the source.
    try:
        for note in refuse({key: prompts}):
            yield Check("rewards", "note", note)
    except ConfigError:
        return  # Those of the config have said it.
    except TaskError as error:
        yield Check("prompts", "bad", str(error))


def _columns(prompts: PromptRows) -> str:
    return ", ".join(prompts.row(0).columns)
