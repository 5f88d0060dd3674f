"""`scripts/simulate`: many trials; a failing one is shrunk and printed so that it can be run again."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

from asyncrl.faulty.failing import command, described, kind_of, outcome_of
from asyncrl.faulty.plan import draw
from asyncrl.faulty.shrinking import shrink
from asyncrl.faulty.world import Outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when all trials held, 1 at the first that did not. The digest in the last line is of every event,
    message and journal of all trials: the same command prints the same one."""
    options = _parsed(arguments)
    tally = Tally()
    for seed in range(options.start, options.start + options.seeds):
        outcome = outcome_of(draw(seed))
        if not isinstance(outcome, Outcome):
            _report(seed, outcome, options.as_it_is)
            return 1
        tally.add(outcome)
        if tally.trials % options.every == 0:
            tally.show()
    tally.show()
    return 0


class Tally:
    """Of trials that held."""

    def __init__(self) -> None:
        self.trials = self._messages = 0
        self._seen, self._began, self._digest = Counter[str](), time.monotonic(), sha256()

    def add(self, outcome: Outcome) -> None:
        self.trials += 1
        self._messages += outcome.messages
        self._seen.update(fault.kind for fault in outcome.struck)
        self._seen["lives"] += outcome.lives
        self._digest.update(outcome.digest.encode())

    def show(self) -> None:
        """One line."""
        rate = self.trials / (time.monotonic() - self._began)
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self._seen.items()))
        done = f"{self.trials} trials held, {rate:.1f} a second, {self._messages} messages"
        print(f"{done}; {counts}; digest {self._digest.hexdigest()[:16]}", flush=True)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulate", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many trials (default 1000)")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first seed (default 0)")
    parser.add_argument("--every", type=int, default=200, metavar="K", help="a line after every K trials (default 200)")
    parser.add_argument("--as-it-is", action="store_true", help="do not shrink a trial that fails")
    return parser.parse_args(arguments)


def _report(seed: int, error: BaseException, as_it_is: bool) -> None:
    print(f"seed {seed} failed: {described(error)}", flush=True)
    trial = draw(seed)
    if not as_it_is:
        trial = shrink(trial, lambda smaller: kind_of(outcome_of(smaller)))
        print(f"smallest trial found that fails in the same way: {described(outcome_of(trial))}")
    print(f"again: {command(trial)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
