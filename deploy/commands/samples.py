"""`asyncrl samples` shows what the model wrote, the reward of each sample by term, and why its tokens were masked."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncrl.config.schema import IN_MEMORY
from asyncrl.config.sources import read
from asyncrl.deploy.checks.run_prompts import draw_of
from asyncrl.deploy.commands.command_parser import CommandParser, positive
from asyncrl.deploy.report.sample_tokens import special_tokens
from asyncrl.engines.models.model_folder import is_complete
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks import Row, training_prompts
from asyncrl.tasks.prompt_sources import runs_code
from asyncrl.tasks.stored_samples import ColumnNames, write_samples
from asyncrl.telemetry.display import CleanConsole
from asyncrl.telemetry.jsonl import read_lines, read_metrics
from asyncrl.telemetry.run_directory import RunDirectory, missing_run
from asyncrl.telemetry.sample_panel import SpecialTokens, group_panel, sample_panel
from asyncrl.telemetry.samples_file import TRANSITIONS, SampleRecord, read_samples, select_samples

DESCRIPTION = f"{__doc__} Without --step, --group, --best, --worst or --masked it shows samples of the last step."


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    path = asked.run / "samples.jsonl"
    if not path.exists():
        raise missing_run(asked.run, "has no samples.jsonl: name a run directory that has trained a step")
    records = read_samples(path)
    if asked.parquet is not None:
        names: ColumnNames = "verl" if asked.verl else "asyncrl"
        export_samples(asked.run, records, asked.parquet, names, print, run_code=asked.run_code)
        return 0
    chosen = select_samples(records, asked.step, asked.group, asked.order, asked.masked, asked.count)
    if not chosen:
        steps = [record.step for record in records]
        written = f"the file has samples of steps {min(steps)} to {max(steps)}" if steps else "the file has no samples"
        raise ConfigError(f"no sample fits; {written} (telemetry.samples_per_step says how many a step writes)")
    console = CleanConsole(sys.stdout)
    tokens = _special_tokens(asked.run)
    columns_of = _columns(asked.run, chosen, run_code=asked.run_code)
    if asked.compare:
        for group in _groups_of(chosen, records):
            console.print(group_panel(group, tokens, columns_of(group[0].group)))
    else:
        for record in chosen:
            console.print(sample_panel(record, tokens=tokens, columns=columns_of(record.group)))
    print(f"{len(chosen)} of {len(records)} recorded samples{_of_all(asked.run)}")
    if chosen[-1].finish == TRANSITIONS:
        print("\n".join(_evaluated_episodes(asked.run, asked.count)))
    return 0


def _evaluated_episodes(run_dir: Path, count: int) -> list[str]:
    """Returns a line for each of the first episodes of the newest evaluation of a policy that acts, and its picture."""
    found = {int(path.stem): path for path in RunDirectory(run_dir).answers.glob("*.jsonl") if path.stem.isdecimal()}
    if not found:
        return ["no episode was evaluated: evaluate.episodes says how many an evaluation plays"]
    path = found[max(found)]
    episodes = list(read_lines(path))
    lines = [f"episodes of the evaluation of version {path.stem} ({path}):"]
    for each in episodes[:count]:
        result = "lost by its environment" if each["reward"] is None else f"return {each['reward']:.6g}"
        lines.append(f"  {each['episode']:3}  {result} after {each['steps']} steps, {each['finish']}")
    if len(episodes) > count:
        lines.append(f"  and {len(episodes) - count} more")
    picture = path.with_suffix(".gif")
    return [*lines, *([f"the first of them as an animation: {picture}"] if picture.exists() else [])]


def _of_all(run_dir: Path) -> str:
    """Returns how many samples the run has trained, where that is known."""
    directory = RunDirectory(run_dir)
    if not directory.started_before or not directory.metrics.exists():
        return ""
    task = read(directory.config).task
    steps = len(read_metrics(directory.metrics))
    trained = steps * task.prompts_per_step * task.samples_per_prompt
    return f", of {trained} in the batches of {steps} steps (telemetry.samples_per_step says how many are recorded)"


def _columns(run_dir: Path, chosen: Sequence[SampleRecord], *, run_code: bool) -> Callable[[int], Mapping[str, object]]:
    """Returns what gives the other columns of a group's row; none where the prompts cannot be read at once again."""
    directory = RunDirectory(run_dir)
    if not directory.started_before or any(each.turns or each.transitions for each in chosen):
        return lambda group: {}
    if any(each.use.startswith("hub:") for each in read(directory.config).task.sources):
        print("the rows of a hub's data set are not read again here: --parquet FILE writes them")
        return lambda group: {}
    try:
        row_of = rows_of_groups(directory, run_code=run_code)
    except (TaskError, ConfigError) as error:
        print(f"the columns of the rows are not shown: {error}")
        return lambda group: {}
    return lambda group: row.columns if (row := row_of(group)) else {}


def _parser() -> CommandParser:
    parser = CommandParser("asyncrl samples", description=DESCRIPTION)
    parser.add_argument("run", type=Path, help="Name the run directory to read.")
    parser.add_argument("--step", type=int, help="Show samples of this step only.")
    parser.add_argument("--group", type=int, metavar="ID", help="Show samples of this group only.")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_const", const="best", dest="order", help="Sort by reward, best first.")
    order.add_argument(
        "--worst", action="store_const", const="worst", dest="order", help="Sort by reward, worst first."
    )
    parser.add_argument("--masked", action="store_true", help="Show only samples with tokens left out of the loss.")
    compare_help = "Show whole groups, each with its prompt once and all of its answers beneath, best first."
    parser.add_argument("--compare", action="store_true", help=compare_help)
    parser.add_argument("-n", type=positive, default=8, dest="count", help="Show at most this many (default: 8).")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="Write all recorded samples to FILE instead.")
    code_help = "Run the code that the run names for its rows, to show or write their other columns."
    parser.add_argument("--run-code", action="store_true", help=code_help)
    parser.add_argument("--verl", action="store_true", help="With --parquet: in the columns of verl.")
    return parser


def _groups_of(chosen: Sequence[SampleRecord], records: Sequence[SampleRecord]) -> list[list[SampleRecord]]:
    """Returns the groups of the chosen samples, with all members that are recorded."""
    groups: dict[tuple[int, int], list[SampleRecord]] = {(each.step, each.group): [] for each in chosen}
    for record in records:
        if (key := (record.step, record.group)) in groups:
            groups[key].append(record)
    return list(groups.values())


def _special_tokens(run_dir: Path) -> SpecialTokens:
    """Returns what shows special tokens, by the tokenizer of the run if it is there."""
    directory = RunDirectory(run_dir)
    named = [Path(read(directory.config).model.name).expanduser()] if directory.started_before else []
    return special_tokens([directory.model, *named])


# Writes the recorded samples of a run to a Parquet file, for `asyncrl samples RUN_DIR --parquet FILE`.


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
