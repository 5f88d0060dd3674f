"""Reports what the staleness limit costs: per step, and by length of completion. Pure.

Whether a token is masked depends on the tokens after it, so long completions lose more than short ones; and an early
cut compares fast members with fast members. Neither bias is corrected; both are reported.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import EndedSample
from asyncrl.controller.gate.length_report import LengthReport
from asyncrl.protocols.messages import TrainedSample
from asyncrl.protocols.staleness import live

WINDOW = 1024
"""Number of last samples that the shares by length are taken over: about a hundred a decile, one to twenty steps."""
DECILES = 10
FAIR_SHARE = 0.5
"""When the longest completions train a smaller share of their tokens, the report names a larger limit."""


@dataclass(frozen=True, slots=True)
class LengthShare:
    """The shares that trained among the completions of one decile of length, which ends at `longest` tokens.

    samples: share of samples with a trained token. tokens: share of the sampled tokens that trained.
    """

    longest: int
    samples: float
    tokens: float


@dataclass(frozen=True, slots=True)
class StepStaleness:
    """The samples that ended in one step. Metrics are computed on request, so that the next step need not wait.

    ended: samples that ended in the step. gaps: baseline gaps of the groups that finished. abandoned: tokens of
    attempts that were given up. window: the last samples, for the shares by length. tested: where groups need differing
    rewards, the last samples that trained or were dropped because their rewards were equal.
    """

    ended: tuple[EndedSample, ...]
    gaps: tuple[float, ...]
    abandoned: int
    window: tuple[EndedSample, ...]
    tested: tuple[EndedSample, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the step.

        `staleness/`: expired, cut_fraction, wasted_tokens, cut_baseline_gap (0 when no group that was cut finished),
        trained_samples/d1..d10 and trained_tokens/d1..d10 (from ten samples on), redone/d1..d10 (when a sample was).
        Where groups need differing rewards also `sampling/accepted` and `sampling/accepted/d1..d10`.
        """
        metrics = step_metrics(self.ended, self.gaps)
        metrics["staleness/wasted_tokens"] += self.abandoned
        metrics |= _by_decile(shares_by_length(self.window)) | redone_by_length(self.window)
        return metrics | accepted_by_length(self.tested)


class StalenessReport:
    """Takes the samples that ended out of a gate, once a step. lengths: of all samples of the run so far."""

    def __init__(self, config: GateConfig) -> None:
        self.lengths = LengthReport()
        self._config = config
        self._window: deque[EndedSample] = deque(maxlen=WINDOW)
        self._tested: deque[EndedSample] = deque(maxlen=WINDOW)
        self._abandoned = 0

    def step(self, gate: Gate, trained: Iterable[TrainedSample]) -> StepStaleness:
        """Reports on the samples that ended since the last call. trained: the trainer's account of each sample."""
        tokens = {(sample.group, sample.member): sample.trained for sample in trained}
        ended = tuple([_with_trained(sample, tokens) for sample in gate.ended])
        gaps = tuple(gate.gaps)
        self.lengths.add(ended)
        gate.ended.clear()
        gate.gaps.clear()
        abandoned = gate.abandoned_tokens - self._abandoned
        self._abandoned = gate.abandoned_tokens
        self._window.extend(sample for sample in ended if sample.reason in ("", "stale"))
        if self._config.need_signal:
            self._tested.extend(sample for sample in ended if sample.reason in ("", "no_signal"))
        return StepStaleness(ended, gaps, abandoned, tuple(self._window), tuple(self._tested))

    def by_length(self) -> list[LengthShare]:
        """Returns the shares by decile of length over the last samples; empty for fewer than ten samples."""
        return shares_by_length(self._window)

    def larger_limit(self) -> int | None:
        """Returns the smallest limit that would let the longest completions train half of their tokens.

        None when they do so under this limit, or when another cause than the limit keeps them from it.
        """
        return smallest_limit(self._window, self._config)

    def advice(self) -> str | None:
        """Returns the advice for the end of a run whose limit kept the longest completions from training, else None."""
        larger = self.larger_limit()
        if larger is None:
            return None
        *_, shorter, longest = self.by_length()
        return (
            f"completions longer than {shorter.longest} tokens trained {longest.tokens:.0%} of their tokens; "
            f"staleness.limit = {larger} is the smallest under which half of them would be young enough to train"
        )


def step_metrics(ended: Sequence[EndedSample], gaps: Sequence[float]) -> dict[str, float]:
    """Returns the metrics of the samples that ended in one step, and of the baseline gaps of its finished groups."""
    trained = [sample for sample in ended if not sample.reason]
    return {
        "staleness/expired": float(sum(sample.reason == "stale" for sample in ended)),
        "staleness/cut_fraction": sum(sample.early for sample in trained) / max(1, len(trained)),
        "staleness/wasted_tokens": float(sum(sample.tokens - sample.trained for sample in ended)),
        "staleness/cut_baseline_gap": sum(gaps) / max(1, len(gaps)),
    }


def shares_by_length(ended: Iterable[EndedSample]) -> list[LengthShare]:
    """Returns the shares by decile of length, shortest first; empty for fewer than ten samples."""
    return [
        LengthShare(
            longest=part[-1].tokens,
            samples=sum(sample.trained > 0 for sample in part) / len(part),
            tokens=sum(sample.trained for sample in part) / max(1, sum(sample.tokens for sample in part)),
        )
        for part in _deciles(ended)
    ]


def accepted_by_length(ended: Iterable[EndedSample]) -> dict[str, float]:
    """Returns the share of samples whose group had differing rewards: of all, and by decile from ten samples on.

    Groups with short completions finish sooner, so they take the places of those that are dropped.
    """
    ended = list(ended)
    deciles = enumerate(_deciles(ended), 1)
    named = {"sampling/accepted": ended, **{f"sampling/accepted/d{number}": part for number, part in deciles}}
    return {name: sum(not sample.reason for sample in part) / len(part) for name, part in named.items() if part}


def redone_by_length(ended: Iterable[EndedSample]) -> dict[str, float]:
    """Returns the share of samples that were sampled more than once, by decile of length; empty where none was.

    The longer a sample takes, the more often the death of a worker or a deadline interrupts it.
    """
    shares = [sum(sample.attempt > 0 for sample in part) / len(part) for part in _deciles(ended)]
    return {f"staleness/redone/d{number}": share for number, share in enumerate(shares, 1)} if any(shares) else {}


def smallest_limit(ended: Iterable[EndedSample], config: GateConfig) -> int | None:
    """Returns the smallest limit over the present one under which the longest decile would train half of its tokens.

    None when it does so already, or when age is not the cause. An estimate: tokens are taken as spread evenly over the
    versions from first to last, and ages as they were under the present limit.
    """
    longest = (_deciles(ended) or [[]])[-1]
    oldest = max((sample.version - sample.first for sample in longest), default=0)
    if not longest or _live_share(longest, config.limit, config) >= FAIR_SHARE:
        return None
    limits = range(config.limit + 1, oldest + 1)
    return next((limit for limit in limits if _live_share(longest, limit, config) >= FAIR_SHARE), None)


def live_tokens(sample: EndedSample, limit: int) -> float:
    """Estimates how many tokens the limit would let train, with the tokens spread evenly over the versions."""
    versions = range(sample.first, sample.last + 1)
    within = sum(bool(live(version, sample.version, limit)) for version in versions)
    return sample.tokens * within / len(versions)


def _live_share(ended: Sequence[EndedSample], limit: int, config: GateConfig) -> float:
    if config.policy == "mask":
        trained = sum(live_tokens(sample, limit) for sample in ended)
    else:
        trained = sum(sample.tokens for sample in ended if live(sample.first, sample.version, limit))
    return trained / max(1, sum(sample.tokens for sample in ended))


def _deciles(ended: Iterable[EndedSample]) -> list[list[EndedSample]]:
    by_length = sorted(ended, key=lambda sample: sample.tokens)
    if len(by_length) < DECILES:
        return []
    ends = [len(by_length) * part // DECILES for part in range(DECILES + 1)]
    return [by_length[ends[part] : ends[part + 1]] for part in range(DECILES)]


def _by_decile(shares: Sequence[LengthShare]) -> dict[str, float]:
    samples = {f"staleness/trained_samples/d{number}": share.samples for number, share in enumerate(shares, 1)}
    return samples | {f"staleness/trained_tokens/d{number}": share.tokens for number, share in enumerate(shares, 1)}


def _with_trained(sample: EndedSample, tokens: dict[tuple[int, int], int]) -> EndedSample:
    return sample if sample.reason else replace(sample, trained=tokens.get((sample.group, sample.member), 0))
