"""Writes the recorded samples of a run to a Parquet file, for `asyncrl samples RUN_DIR --parquet FILE`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.config.schema import IN_MEMORY
from asyncrl.config.sources import read
from asyncrl.deploy.checks.run_prompts import draw_of
from asyncrl.engines.models.model_folder import is_complete
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks import Row, training_prompts
from asyncrl.tasks.prompt_sources import runs_code
from asyncrl.tasks.stored_samples import ColumnNames, write_samples
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.samples_file import TRANSITIONS, SampleRecord


def export_samples(
    run_dir: Path,
    records: Sequence[SampleRecord],
    target: Path,
    names: ColumnNames,
    say: Callable[[str], None],
    *,
    run_code: bool = False,
) -> None:
    """Writes the samples with the rows of their prompts, and says what the file has and lacks. run_code: runs what the
    config names for its rows. Raises ConfigError."""
    if any(record.finish == TRANSITIONS for record in records):
        raise ConfigError("--parquet: a policy that acts has no tokens; samples.jsonl has its transitions")
    directory = RunDirectory(run_dir.absolute())
    row_of = _rows(directory, say, run_code=run_code)
    try:
        as_json = write_samples(target, directory.path.name, records, row_of, names)
    except OSError as error:
        raise ConfigError(f"--parquet: {target} cannot be written: {error.strerror}") from error
    say(f"{len(records)} samples of {len({record.group for record in records})} groups are in {target}")
    if as_json:
        say(f"as JSON, because their values have several types: {', '.join(as_json)}")
    if without := sum(not record.token_ids for record in records):
        say(f"{without} of them have no tokens, and cannot be trained with generation.stored_samples")


RowOf = Callable[[int], Row | None]


def _rows(directory: RunDirectory, say: Callable[[str], None], *, run_code: bool) -> RowOf:
    """Returns what gives the row of a group's prompt, as the run drew it; none, and a line, where that is unknown."""
    try:
        return rows_of_groups(directory, run_code=run_code)
    except (TaskError, ConfigError) as error:
        say(f"the file has the text of the prompts, and none of their other columns: {error}")
        return lambda group: None


def rows_of_groups(directory: RunDirectory, *, run_code: bool) -> RowOf:
    """Reads the prompts of a run again, and returns what gives the row of a group as the run drew it. Raises
    ConfigError or TaskError where that is not possible, or code would run that may not: a run directory may be from
    anybody."""
    config = read(directory.config)
    code = [each.use for each in config.task.sources if runs_code(each.use)]
    code += [config.task.curriculum] if config.task.curriculum else []
    if code and not run_code:
        raise ConfigError(
            f"they need code that the run names, {', '.join(code)}; --run-code runs it, without a sandbox"
        )
    if config.task.prompts == IN_MEMORY:
        raise ConfigError("the prompts were given from Python")
    model = directory.model if is_complete(directory.model) else Path(config.model.name)
    return draw_of(config, training_prompts(config), model)
