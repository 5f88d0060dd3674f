"""What the staleness limit costs: per step, and by length of completion. Pure.

Whether a token is masked depends on what follows it, so long completions lose more than short ones, and an early cut
compares fast members with fast members. Neither is corrected; both are reported.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.groups import GateConfig, Outcome
from asyncrl.lengths import Lengths
from asyncrl.protocols.messages import TrainedSample
from asyncrl.staleness import Gate, live

WINDOW = 1024
"""Samples that the shares by length are taken over: about a hundred a decile, one to twenty steps."""
DECILES = 10
FAIR_SHARE = 0.5
"""When the longest completions train a smaller share of their tokens than this, a larger limit is named."""


@dataclass(frozen=True, slots=True)
class Fate:
    """A sample that ended, and how many of its tokens were trained."""

    outcome: Outcome
    trained: int


@dataclass(frozen=True, slots=True)
class LengthShare:
    """Of the completions up to `longest` tokens, but longer than those before: shares that trained.

    samples: those with a trained token; tokens: trained of all sampled.
    """

    longest: int
    samples: float
    tokens: float


@dataclass(frozen=True, slots=True)
class StepStaleness:
    """What became of samples in one step. Figures are made when asked for: the next step does not wait for them.

    fates: of those that ended in it; gaps: of the groups that finished; abandoned: tokens of attempts given up;
    window: the last samples, for the shares by length. judged: where groups need a signal, the last that had one or
    were dropped for lack of it.
    """

    fates: tuple[Fate, ...]
    gaps: tuple[float, ...]
    abandoned: int
    window: tuple[Fate, ...]
    judged: tuple[Fate, ...] = ()

    def metrics(self) -> dict[str, float]:
        """`staleness/`: expired, cut_fraction, wasted_tokens, cut_baseline_gap (0 when no group that was cut finished),
        trained_samples/d1..d10 and trained_tokens/d1..d10 (when there are ten samples), redone/d1..d10 (when one
        was). Where groups need a signal also `sampling/accepted` and `sampling/accepted/d1..d10`."""
        metrics = step_metrics(self.fates, self.gaps)
        metrics["staleness/wasted_tokens"] += self.abandoned
        metrics |= _by_decile(shares_by_length(self.window)) | redone_by_length(self.window)
        return metrics | accepted_by_length(self.judged)


class StalenessReport:
    """Takes out of a gate, once a step, what became of its samples. lengths: of all of them so far."""

    def __init__(self, config: GateConfig) -> None:
        self.lengths = Lengths()
        self._config = config
        self._window: deque[Fate] = deque(maxlen=WINDOW)
        self._judged: deque[Fate] = deque(maxlen=WINDOW)
        self._abandoned = 0

    def step(self, gate: Gate, trained: Iterable[TrainedSample]) -> StepStaleness:
        """Since the last call; `trained`: what the trainer did with each sample of the step."""
        tokens = {(sample.group, sample.member): sample.trained for sample in trained}
        fates = tuple([Fate(outcome, _trained_tokens(outcome, tokens)) for outcome in gate.outcomes])
        gaps = tuple(gate.gaps)
        self.lengths.ended(fate.outcome for fate in fates)
        gate.outcomes.clear()
        gate.gaps.clear()
        abandoned, self._abandoned = gate.abandoned_tokens - self._abandoned, gate.abandoned_tokens
        self._window.extend(fate for fate in fates if fate.outcome.reason in ("", "stale"))
        if self._config.need_signal:
            self._judged.extend(fate for fate in fates if fate.outcome.reason in ("", "no_signal"))
        return StepStaleness(fates, gaps, abandoned, tuple(self._window), tuple(self._judged))

    def by_length(self) -> list[LengthShare]:
        """Shares by decile of length over the last samples; empty when there are fewer than ten."""
        return shares_by_length(self._window)

    def larger_limit(self) -> int | None:
        """The smallest limit that would let the longest completions train half of their tokens; None: it is not this
        limit that keeps them from it."""
        return smallest_limit(self._window, self._config)

    def advice(self) -> str | None:
        """What to tell the user at the end of a run when the limit kept the longest completions from training."""
        larger = self.larger_limit()
        if larger is None:
            return None
        *_, shorter, longest = self.by_length()
        return (
            f"completions longer than {shorter.longest} tokens trained {longest.tokens:.0%} of their tokens; "
            f"staleness.limit = {larger} is the smallest under which half of them would be young enough to train"
        )


def step_metrics(fates: Sequence[Fate], gaps: Sequence[float]) -> dict[str, float]:
    """Of the samples that ended in one step, and the baseline gaps of the groups that finished in it."""
    taken = [fate.outcome for fate in fates if not fate.outcome.reason]
    return {
        "staleness/expired": float(sum(fate.outcome.reason == "stale" for fate in fates)),
        "staleness/cut_fraction": sum(outcome.early for outcome in taken) / max(1, len(taken)),
        "staleness/wasted_tokens": float(sum(fate.outcome.tokens - fate.trained for fate in fates)),
        "staleness/cut_baseline_gap": sum(gaps) / max(1, len(gaps)),
    }


def shares_by_length(fates: Iterable[Fate]) -> list[LengthShare]:
    """One entry a decile of length, shortest first; empty when there are fewer samples than deciles."""
    return [
        LengthShare(
            longest=part[-1].outcome.tokens,
            samples=sum(fate.trained > 0 for fate in part) / len(part),
            tokens=sum(fate.trained for fate in part) / max(1, sum(fate.outcome.tokens for fate in part)),
        )
        for part in _deciles(fates)
    ]


def accepted_by_length(fates: Iterable[Fate]) -> dict[str, float]:
    """Shares of samples whose group had differing rewards: of all, and by decile of length, of ten samples or more.

    Groups that are finished sooner, and so are of short completions, take the places of those that are dropped.
    """
    fates = list(fates)
    deciles = enumerate(_deciles(fates), 1)
    named = {"sampling/accepted": fates, **{f"sampling/accepted/d{number}": part for number, part in deciles}}
    return {name: sum(not fate.outcome.reason for fate in part) / len(part) for name, part in named.items() if part}


def redone_by_length(fates: Iterable[Fate]) -> dict[str, float]:
    """Share of samples that were sampled more than once, by decile of length; empty where none was.

    The longer a sample takes, the more often a worker's death or a deadline hits it.
    """
    shares = [sum(fate.outcome.attempt > 0 for fate in part) / len(part) for part in _deciles(fates)]
    return {f"staleness/redone/d{number}": share for number, share in enumerate(shares, 1)} if any(shares) else {}


def smallest_limit(fates: Iterable[Fate], config: GateConfig) -> int | None:
    """The smallest limit over the present one under which the longest decile would train half of its tokens.

    None when it does, or when age is not what keeps it from it. An estimate: sampled tokens are taken as spread evenly
    over the versions from first to last, and ages as they were under the present limit.
    """
    longest = [fate.outcome for fate in (_deciles(fates) or [[]])[-1]]
    oldest = max((outcome.version - outcome.first for outcome in longest), default=0)
    if not longest or _live_share(longest, config.limit, config) >= FAIR_SHARE:
        return None
    limits = range(config.limit + 1, oldest + 1)
    return next((limit for limit in limits if _live_share(longest, limit, config) >= FAIR_SHARE), None)


def live_tokens(outcome: Outcome, limit: int) -> float:
    """Tokens of a sample that the limit would have let train, with its tokens spread evenly over its versions."""
    versions = range(outcome.first, outcome.last + 1)
    within = sum(bool(live(version, outcome.version, limit)) for version in versions)
    return outcome.tokens * within / len(versions)


def _live_share(outcomes: Sequence[Outcome], limit: int, config: GateConfig) -> float:
    if config.policy == "mask":
        trained = sum(live_tokens(outcome, limit) for outcome in outcomes)
    else:
        trained = sum(outcome.tokens for outcome in outcomes if live(outcome.first, outcome.version, limit))
    return trained / max(1, sum(outcome.tokens for outcome in outcomes))


def _deciles(fates: Iterable[Fate]) -> list[list[Fate]]:
    by_length = sorted(fates, key=lambda fate: fate.outcome.tokens)
    if len(by_length) < DECILES:
        return []
    ends = [len(by_length) * part // DECILES for part in range(DECILES + 1)]
    return [by_length[ends[part] : ends[part + 1]] for part in range(DECILES)]


def _by_decile(shares: Sequence[LengthShare]) -> dict[str, float]:
    samples = {f"staleness/trained_samples/d{number}": share.samples for number, share in enumerate(shares, 1)}
    return samples | {f"staleness/trained_tokens/d{number}": share.tokens for number, share in enumerate(shares, 1)}


def _trained_tokens(outcome: Outcome, tokens: dict[tuple[int, int], int]) -> int:
    return 0 if outcome.reason else tokens.get((outcome.group, outcome.member), 0)
