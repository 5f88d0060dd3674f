"""asyncrl samples: what the model wrote, its reward by term, and why tokens were masked."""

import argparse
from pathlib import Path


def main(arguments: list[str]) -> int:
    from rich.console import Console

    from asyncrl.errors import ConfigError
    from asyncrl.telemetry.display import sample_panel
    from asyncrl.telemetry.samples_file import read_samples, select_samples

    asked = _parser().parse_args(arguments)
    path = Path(asked.run) / "samples.jsonl"
    if not path.exists():
        raise ConfigError(f"{path} is not there: name a run directory that has trained a step")
    records = read_samples(path)
    chosen = select_samples(records, asked.step, asked.group, asked.order, asked.masked, asked.count)
    if not chosen:
        raise ConfigError(_nothing(sorted({record.step for record in records})))
    console = Console()
    for record in chosen:
        console.print(sample_panel(record))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("asyncrl samples", description=__doc__)
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--step", type=int, help="of this step (default: the last one)")
    parser.add_argument("--group", type=int, metavar="ID", help="of this group, over all steps")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_const", const="best", dest="order", help="highest rewards first")
    order.add_argument("--worst", action="store_const", const="worst", dest="order", help="lowest rewards first")
    parser.add_argument("--masked", action="store_true", help="only samples with tokens left out of the loss")
    parser.add_argument("-n", type=_positive, default=8, dest="count", help="how many (default: 8)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid positive number: {text!r}")
    return int(text)


def _nothing(steps: list[int]) -> str:
    written = f"samples are written of steps {steps[0]} to {steps[-1]}" if steps else "no samples are written yet"
    return f"no sample fits; {written} (telemetry.samples_per_step says how many of each)"
