"""Runs many trials for `scripts/simulate`; shrinks a failing one and prints the command that runs it again."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

from asyncrl.simulation.faults.shrinking import shrink
from asyncrl.simulation.faults.trial_failures import command, described, kind_of, outcome_of
from asyncrl.simulation.faults.trial_plan import draw_trial
from asyncrl.simulation.faults.trial_run import TrialOutcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trials with injected faults, one a seed, and exits with status 1 at the first that fails. The digest in the
    last line covers every event, message and journal of all trials: the same command prints the same digest."""
    options = _parsed(arguments)
    counts = TrialCounts()
    for seed in range(options.start, options.start + options.seeds):
        outcome = outcome_of(draw_trial(seed))
        if not isinstance(outcome, TrialOutcome):
            _report(seed, outcome, options.as_it_is)
            return 1
        counts.add(outcome)
        if counts.trials % options.every == 0:
            counts.show()
    counts.show()
    return 0


class TrialCounts:
    """Counts the trials that held, and what happened in them."""

    def __init__(self) -> None:
        self.trials = 0
        self._messages = 0
        self._seen = Counter[str]()
        self._began = time.monotonic()
        self._digest = sha256()

    def add(self, outcome: TrialOutcome) -> None:
        self.trials += 1
        self._messages += outcome.messages
        self._seen.update(fault.kind for fault in outcome.injected)
        self._seen["lives"] += outcome.lives
        self._digest.update(outcome.digest.encode())

    def show(self) -> None:
        """Prints one line."""
        rate = self.trials / (time.monotonic() - self._began)
        seen = ", ".join(f"{count} {what}" for what, count in sorted(self._seen.items()))
        done = f"{self.trials} trials held, {rate:.1f} a second, {self._messages} messages"
        print(f"{done}; {seen}; digest {self._digest.hexdigest()[:16]}", flush=True)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulate", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="number of trials (default 1000)")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first seed (default 0)")
    parser.add_argument("--every", type=int, default=200, metavar="K", help="trials per printed line (default 200)")
    parser.add_argument("--as-it-is", action="store_true", help="print a failing trial without shrinking it")
    return parser.parse_args(arguments)


def _report(seed: int, error: BaseException, as_it_is: bool) -> None:
    print(f"seed {seed} failed: {described(error)}", flush=True)
    trial = draw_trial(seed)
    if not as_it_is:
        trial = shrink(trial, lambda smaller: kind_of(outcome_of(smaller)))
        print(f"smallest trial found that fails in the same way: {described(outcome_of(trial))}")
    print(f"run it again: {command(trial)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
