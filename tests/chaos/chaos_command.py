"""scripts/chaos: the quickstart trains on three network hosts while faults happen to it that a seed chooses. It prints
what each kind of fault costs; exit status 1 when a promise is broken, or a program ended that no fault had killed."""

import argparse
import asyncio
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from subprocess import SubprocessError

from tests.chaos.faults import KINDS
from tests.chaos.fleet_on_hosts import RunEnded, fleet_on_hosts
from tests.chaos.outcome import REWARD, Outcome
from tests.chaos.trial import Trial
from tests.network_hosts import why_no_hosts

LEARNT = 250
"""Steps after which the quickstart has learnt; a shorter trial is not asked for its reward."""
FLAGS = ("--steps", "1000000", "--evaluate.prompts=", "--training.checkpoint_every", "10", "--restarts", "100000")


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    if why := why_no_hosts():
        print(why, file=sys.stderr)
        return 2
    if not (kinds := tuple(kind for kind in KINDS if asked.only in kind.name)):
        print(f"--only: no kind of fault has {asked.only!r} in its name", file=sys.stderr)
        return 2
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="asyncrl-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    ended = ""
    with fleet_on_hosts(folder, "quickstart", FLAGS) as fleet:
        trial = Trial(fleet, asked.seed, 60 * asked.minutes, asked.pause, kinds)
        try:
            asyncio.run(trial.run())
        except RunEnded as error:
            ended = f"the run did not go on: {error}"
        except (AssertionError, OSError, SubprocessError, KeyboardInterrupt) as error:
            ended = f"the trial ended before its time, by no fault of the product: {error!r}"
    if not trial.faults:
        print(f"{ended}\nall is kept in {folder}", file=sys.stderr)
        return 1
    outcome = Outcome(trial, folder / "run", fleet.shown)
    outcome.problems += [ended] if ended else []
    if len(trial.fleet.watch.steps) >= LEARNT and outcome.reward < REWARD:
        outcome.problems.append(f"the reward reached {outcome.reward:.2f}, and it has to reach {REWARD}")
    _show(outcome, asked.minutes, asked.json)
    print(f"all is kept in {folder}")
    return 1 if outcome.problems else 0


def _show(outcome: Outcome, minutes: float, path: Path | None) -> None:
    summary = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "minutes": minutes, **outcome.summary()}
    print(outcome.table(), outcome.report, sep="\n\n")
    print("\n".join(f"{name}: {value}" for name, value in summary.items()))
    for problem in outcome.problems:
        print(f"BROKEN: {problem}")
    if path is not None:
        path.write_text(json.dumps({**summary, "details": outcome.details()}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="How long faults happen.")
    parser.add_argument("--seed", type=int, default=0, help="Chooses the faults.")
    parser.add_argument("--pause", type=float, default=6.0, help="Longest pause between two faults, in seconds.")
    parser.add_argument("--only", default="", help="Only kinds of faults that have this text in their names.")
    parser.add_argument("--json", type=Path, help="File for the result and every fault.")
    parser.add_argument("--folder", type=Path, help="Empty folder for everything; default: a new one.")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
