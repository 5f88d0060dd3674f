"""`asyncrl samples` shows what the model wrote, the reward of each sample by term, and why its tokens were masked."""

import argparse
from pathlib import Path

DESCRIPTION = f"{__doc__} Without --step, --group, --best, --worst or --masked it shows samples of the last step."


def main(arguments: list[str]) -> int:
    from rich.console import Console

    from asyncrl.errors import ConfigError
    from asyncrl.telemetry.sample_panel import sample_panel
    from asyncrl.telemetry.samples_file import read_samples, select_samples

    parser = argparse.ArgumentParser("asyncrl samples", description=DESCRIPTION)
    parser.add_argument("run", type=Path, help="Name the run directory to read.")
    parser.add_argument("--step", type=int, help="Show samples of this step only.")
    parser.add_argument("--group", type=int, metavar="ID", help="Show samples of this group only.")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_const", const="best", dest="order", help="Sort by reward, best first.")
    order.add_argument(
        "--worst", action="store_const", const="worst", dest="order", help="Sort by reward, worst first."
    )
    parser.add_argument("--masked", action="store_true", help="Show only samples with tokens left out of the loss.")
    parser.add_argument("-n", type=_positive, default=8, dest="count", help="Show at most this many (default: 8).")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="Write all recorded samples to FILE instead.")
    parser.add_argument("--verl", action="store_true", help="With --parquet: in the columns of verl.")
    asked = parser.parse_args(arguments)
    path = asked.run / "samples.jsonl"
    if not path.exists():
        raise ConfigError(f"{path} does not exist: name a run directory that has trained a step")
    records = read_samples(path)
    if asked.parquet is not None:
        from asyncrl.deploy.commands.inspecting.parquet_samples import export_samples

        export_samples(asked.run, records, asked.parquet, "verl" if asked.verl else "asyncrl", print)
        return 0
    chosen = select_samples(records, asked.step, asked.group, asked.order, asked.masked, asked.count)
    if not chosen:
        steps = [record.step for record in records]
        written = f"the file has samples of steps {min(steps)} to {max(steps)}" if steps else "the file has no samples"
        raise ConfigError(f"no sample fits; {written} (telemetry.samples_per_step says how many a step writes)")
    console = Console()
    for record in chosen:
        console.print(sample_panel(record))
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid positive number: {text!r}")
    return int(text)
