"""`scripts/simulate`: many trials; a failing one is shrunk and printed so that it can be run again."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence

from asyncrl.errors import AsyncrlError
from asyncrl.faulty.plan import Trial, draw
from asyncrl.faulty.shrinking import shrink
from asyncrl.faulty.world import Outcome, endure

FAILURES = (
    *(AssertionError, AsyncrlError, TimeoutError, ExceptionGroup),
    *(AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
"""What a trial can end in. An AssertionError is an invariant, the others came out of a controller."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when all trials held, 1 at the first that did not."""
    options = _parsed(arguments)
    seen, began, messages = Counter[str](), time.monotonic(), 0
    for seed in range(options.start, options.start + options.seeds):
        try:
            outcome = endure(draw(seed))
        except FAILURES as error:
            _report(seed, error, options.as_it_is)
            return 1
        _count(seen, outcome)
        messages += outcome.messages
        if (seed - options.start + 1) % options.every == 0:
            _progress(seed - options.start + 1, began, messages, seen)
    _progress(options.seeds, began, messages, seen)
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulate", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many trials (default 1000)")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first seed (default 0)")
    parser.add_argument("--every", type=int, default=1000, metavar="K", help="a line after every K trials")
    parser.add_argument("--as-it-is", action="store_true", help="do not shrink a trial that fails")
    return parser.parse_args(arguments)


def _report(seed: int, error: BaseException, as_it_is: bool) -> None:
    print(f"seed {seed} failed: {described(error)}", flush=True)
    trial = draw(seed)
    if not as_it_is:
        trial = shrink(trial, how_it_fails)
    print(f"endure({trial!r})\n  {described(failure(trial))}", flush=True)


def failure(trial: Trial) -> BaseException | None:
    """What a trial ends in, None when it holds."""
    try:
        endure(trial)
    except FAILURES as error:
        return error
    return None


def how_it_fails(trial: Trial) -> str:
    """The class of its failure."""
    error = failure(trial)
    return type(error).__name__ if error is not None else ""


def described(error: BaseException | None) -> str:
    """One line."""
    return f"{type(error).__name__}: {error}"[:1000] if error is not None else "held"


def _count(seen: Counter[str], outcome: Outcome) -> None:
    seen.update(fault.kind for fault in outcome.struck)
    seen["lives"] += outcome.lives


def _progress(trials: int, began: float, messages: int, seen: Counter[str]) -> None:
    seconds = time.monotonic() - began
    counts = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    print(f"{trials} trials held, {trials / seconds:.1f} a second, {messages} messages; {counts}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
