"""Finds mistakes in the sources of prompts before a run starts, without running the user's code."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from asyncrl.children.code.row_tests import cases_in
from asyncrl.config.named_files import COMPRESSED, data_folder, data_suffix
from asyncrl.config.problems import Problem
from asyncrl.config.schema import IN_MEMORY, Config, TaskConfig
from asyncrl.config.user_code import source_problem
from asyncrl.environments.loading import OF_PROGRAMS
from asyncrl.errors import ConfigError, TaskError
from asyncrl.rewards.functions import row_checks
from asyncrl.rewards.sample import CheckRow, RowError
from asyncrl.tasks.prompt_rows import MixedPrompts, PromptRows, Prompts, checked_rows
from asyncrl.tasks.prompt_sources import CURRICULUM, held_out_prompts, pretraining_rows, training_prompts
from asyncrl.tasks.prompt_sources import SOURCE as HUMAN_EVAL
from asyncrl.tasks.row_files import PARQUET, files_of_folder
from asyncrl.tasks.stored_samples import read_stored_samples

READ_AHEAD = 16 * 2**20
"""Bytes of the largest file whose rows are read before the run starts, in about half a second. The run reads its rows
once more when it starts, and says then what is wrong with a larger file."""
INFLATION = 8
"""Bytes of text that a byte of a compressed file may become; tables of rows hold more repetition than prose."""
PACKAGES = ("hub", "reasoning_gym", HUMAN_EVAL)
"""Kinds of sources that a package makes; its absence is another problem, and all else is found as the run reads it."""


def prompt_problems(config: Config) -> Iterator[Problem]:
    """Yields the problems of the sources of prompts and of texts to learn; rows from Python have none here."""
    sources: dict[str, tuple[list[str], Callable[[], object]]] = {
        "task.prompts": ([each.use for each in config.task.sources], lambda: training_prompts(config)),
        "task.pretrain": ([config.task.pretrain], lambda: pretraining_rows(config.task)),
    }
    for each in config.evaluate.held_out:
        sources[f"{each.section}.prompts"] = ([each.prompts], partial(held_out_prompts, config, name=each.name))
    yield from _curriculum_problems(config.task)
    for key, (specs, read) in sources.items():
        if specs not in ([""], [IN_MEMORY]):
            yield from _problems(config, key, specs, read)
    stored = config.generation.stored_samples
    if stored and find_spec("pyarrow") is not None:  # Its absence is another problem.
        try:
            read_stored_samples(Path(stored), config.task.samples_per_prompt)
        except TaskError as error:
            yield Problem("generation.stored_samples", "", str(error).removeprefix("generation.stored_samples: "))


def _curriculum_problems(task: TaskConfig) -> Iterator[Problem]:
    """Yields why there is no curriculum of these sources, as far as that is known without running its code."""
    if not task.curriculum:
        return
    if isinstance(task.prompts, str) or any(each.weight for each in task.prompts):
        text = "it gives the sources of task.prompts their weights: write a list of sources there, without weights"
        yield Problem(CURRICULUM, "", text, ("task.prompts",))
    elif problem := source_problem(task.curriculum, CURRICULUM):
        yield problem


def check_rows(config: Config, sources: Mapping[str, PromptRows]) -> None:
    """Raises TaskError, which begins with the key of the source, for the first row that is none, or that a reward
    template or an environment of ours cannot use. sources: by config key."""
    for key, prompts in sources.items():
        own = (each.name for each in config.evaluate.held_out if each.functions and key == f"{each.section}.prompts")
        checks = row_checks(config, next(own, None))
        if config.environment.use in OF_PROGRAMS:
            column = str(config.environment.options.get("column", "tests"))
            checks.append((config.environment.use, partial(cases_in, column=column)))
        for part in prompts.parts if isinstance(prompts, MixedPrompts) else (prompts,):
            try:
                _check_rows(part, checks)
            except TaskError as error:
                raise TaskError(f"{key}: {error}") from None


def _check_rows(prompts: PromptRows, checks: Sequence[tuple[str, CheckRow]]) -> None:
    for number in range(checked_rows(prompts.rows) if isinstance(prompts, Prompts) else len(prompts)):
        columns = prompts.row(number).columns
        for use, check in checks:
            try:
                check(columns)
            except TaskError as error:
                raise TaskError(f"{prompts.where(number)}: {error}") from None
            except RowError as error:
                said = f"{prompts.where(number)}: {use} needs the column {error.column}: {error}"
                raise TaskError("; ".join(filter(None, (said, error.advice)))) from None


def is_read_ahead(spec: str) -> bool:
    """Returns whether this is a file of prompts, or a folder of such, whose rows are read before a run starts."""
    folder = None if data_suffix(spec) else data_folder(spec)
    try:
        files = [Path(spec).expanduser()] if folder is None else files_of_folder(*folder)
    except TaskError:
        return True  # Reading says what is wrong with the folder.
    kinds = {data_suffix(file.name) for file in files if file.is_file()}
    if not kinds or "" in kinds or (PARQUET in kinds and find_spec("pyarrow") is None):
        return False
    return sum(map(_inflated, files)) <= READ_AHEAD


def _inflated(file: Path) -> int:
    """Returns the bytes that the rows of a file may have in memory."""
    is_packed = file.name.lower().endswith((COMPRESSED, PARQUET))
    return file.stat().st_size * (INFLATION if is_packed else 1)


def _problems(config: Config, key: str, specs: Sequence[str], read: Callable[[], object]) -> Iterator[Problem]:
    """Yields the problems of the sources of one key: their rows are read where that is quick and runs no code."""
    unread = [spec for spec in specs if not _is_read_now(spec)]
    code = [spec for spec in unread if ":" in spec and spec.partition(":")[0] not in PACKAGES]
    yield from (problem for spec in code if (problem := source_problem(spec, key)) is not None)
    if unread:
        return
    try:
        rows = read()
        if isinstance(rows, Prompts | MixedPrompts):
            check_rows(config, {key: rows})
    except (TaskError, ConfigError) as error:
        yield Problem.of_error(error, key)


def _is_read_now(spec: str) -> bool:
    """Returns whether a source is read before a run starts: small files, and what is no source or is not there."""
    if "://" in spec:
        return True
    if data_suffix(spec):
        return is_read_ahead(spec) or not Path(spec).expanduser().is_file()
    return is_read_ahead(spec) if data_folder(spec) else ":" not in spec
