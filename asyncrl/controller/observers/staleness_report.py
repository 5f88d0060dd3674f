"""Reports what the staleness limit costs: per step, and by length of completion. Pure.

Whether a token is masked depends on the tokens after it, so long completions lose more than short ones; short ones are
done first, so whatever ends a run loses more of the long ones; and an early cut compares fast members with fast
members. No bias is corrected; all are reported.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

import numpy as np

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import EndedSample, SampleState, Stage
from asyncrl.protocols.messages import LEFT_OUT, TrainedSample
from asyncrl.protocols.staleness import live

WINDOW = 1024
"""Number of last samples that the shares by length are taken over: about a hundred a decile, one to twenty steps."""
DECILES = 10
FAIR_SHARE = 0.5
"""Share of their tokens that the longest completions should train; under it the report names a larger limit."""
NOTEWORTHY = 0.2
"""Difference of two shares by length that is worth a sentence: ten samples of a hundred differ by chance."""
LONGER = 1.5
"""Ratio of the longest completions to the shortest ones from which the report compares them: where lengths hardly
differ, chance alone decides which are in flight at the end."""
UNTRAINED = ("truncated", "rejected", "not finite", LEFT_OUT)
"""Reasons that only a step gives: the gate had accepted these samples."""

End = Literal["trained", "dropped", "abandoned"]
ENDS: tuple[End, ...] = ("trained", "dropped", "abandoned")


class StalenessReport:
    """Takes the samples that ended out of a gate, once a step, and counts for each length how they ended."""

    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self._ends: dict[int, Counter[End]] = {}
        self._window: deque[EndedSample] = deque(maxlen=WINDOW)
        self._tested: deque[EndedSample] = deque(maxlen=WINDOW)
        self._abandoned = 0

    def step(self, gate: Gate, trained: Iterable[TrainedSample]) -> dict[str, float]:
        """Returns metrics of the samples that ended since the last call. trained: the trainer's account of each sample.

        Shares by decile of length tell whether long completions lose more; docs/metrics.md explains each metric.
        """
        tokens = {(sample.group, sample.member): sample.trained for sample in trained}
        ended = [
            sample if sample.reason else sample._replace(trained=tokens.get((sample.group, sample.member), 0))
            for sample in gate.ended
        ]
        wasted = sum(sample.tokens - sample.trained for sample in ended) + gate.abandoned_tokens - self._abandoned
        in_loss = [sample for sample in ended if not sample.reason]
        metrics = {
            "staleness/expired": float(sum(sample.reason == "stale" for sample in ended)),
            "staleness/cut_fraction": sum(sample.early for sample in in_loss) / max(1, len(in_loss)),
            "staleness/wasted_tokens": float(wasted),
            "staleness/cut_baseline_gap": sum(gate.gaps) / max(1, len(gate.gaps)),
        }
        self._abandoned = gate.abandoned_tokens
        gate.ended.clear()
        gate.gaps.clear()
        for sample in ended:
            if sample.tokens:  # A sample that was dropped before it was sampled has no length yet.
                self._ends.setdefault(sample.tokens, Counter())["dropped" if sample.reason else "trained"] += 1
        self._window.extend(sample for sample in ended if sample.reason in ("", "stale", *UNTRAINED))
        if self._config.need_signal:
            self._tested.extend(sample for sample in ended if sample.reason in ("", "no_signal", *UNTRAINED))
        return metrics | self._by_length()

    def _by_length(self) -> dict[str, float]:
        metrics = {}
        redone = any(sample.attempt for sample in self._window)
        for number, part in enumerate(deciles(self._window), 1):
            metrics[f"staleness/trained_samples/d{number}"] = fmean(sample.trained > 0 for sample in part)
            metrics[f"staleness/trained_tokens/d{number}"] = tokens_trained(part)
            if redone:
                metrics[f"staleness/redone/d{number}"] = fmean(sample.attempt > 0 for sample in part)
        if self._tested:
            metrics["sampling/accepted"] = fmean(sample.reason != "no_signal" for sample in self._tested)
        for number, part in enumerate(deciles(self._tested), 1):
            metrics[f"sampling/accepted/d{number}"] = fmean(sample.reason != "no_signal" for sample in part)
        return metrics

    def advice(self) -> str | None:
        """Returns the advice for the end of a run whose limit kept the longest completions from training, else None."""
        larger = smallest_limit(self._window, self._config)
        if larger is None:
            return None
        *_, shorter, longest = deciles(self._window)
        return (
            f"completions longer than {shorter[-1].tokens} tokens "
            f"trained {tokens_trained(longest):.0%} of their tokens; "
            f"staleness.limit = {larger} is the smallest under which half of them would be young enough to train"
        )

    def length_bias(self, in_flight: Iterable[SampleState]) -> str | None:
        """Returns a sentence for the end of a run, which abandons these samples, if long completions trained less often
        than short ones; None otherwise, and for fewer than ten samples."""
        ends = {tokens: Counter(counts) for tokens, counts in self._ends.items()}
        for sample in in_flight:
            if sample.stage in (Stage.SCORING, Stage.READY):
                ends.setdefault(sample.tokens, Counter())["abandoned"] += 1
        if not (tenths := by_tenth(ends)):
            return None
        (shortest, of_short), (below, _), (longest, of_long) = tenths[0], tenths[-2], tenths[-1]
        if of_short["trained"] - of_long["trained"] < NOTEWORTHY or below < LONGER * shortest:
            return None
        drain = '; finish = "drain" trains what is in flight at the end' if of_long["abandoned"] >= NOTEWORTHY else ""
        return (
            f"of the longest tenth of the completions ({below} to {longest} tokens) {of_long['trained']:.0%} were "
            f"trained, {of_long['dropped']:.0%} dropped and {of_long['abandoned']:.0%} abandoned at the end; of the "
            f"shortest tenth (up to {shortest} tokens) {of_short['trained']:.0%} were trained{drain}"
        )


def deciles(ended: Iterable[EndedSample]) -> list[list[EndedSample]]:
    """Returns the samples in ten parts of rising length; empty for fewer than ten samples."""
    by_length = sorted(ended, key=lambda sample: sample.tokens)
    if len(by_length) < DECILES:
        return []
    ends = [len(by_length) * part // DECILES for part in range(DECILES + 1)]
    return [by_length[ends[part] : ends[part + 1]] for part in range(DECILES)]


def tokens_trained(ended: Sequence[EndedSample]) -> float:
    """Returns the share of the sampled tokens that trained."""
    return sum(sample.trained for sample in ended) / max(1, sum(sample.tokens for sample in ended))


def smallest_limit(ended: Iterable[EndedSample], config: GateConfig) -> int | None:
    """Returns the smallest limit over the present one under which the longest decile would train half of its tokens.

    None when it does so already, or when age is not the cause. An estimate: ages are those under the present limit.
    """
    longest = (deciles(ended) or [[]])[-1]
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
    if config.rule.by_token:
        trained = sum(live_tokens(sample, limit) for sample in ended)
    else:
        trained = sum(sample.tokens for sample in ended if live(sample.first, sample.version, limit))
    return trained / max(1, sum(sample.tokens for sample in ended))


def by_tenth(ends: dict[int, Counter[End]]) -> list[tuple[int, dict[End, float]]]:
    """Returns for each tenth of the samples, shortest first, its longest length and the share of each end.

    Samples of one length on both sides of a border are divided evenly. Empty for fewer than ten samples.
    """
    lengths = sorted(ends)
    up_to = np.cumsum([[0.0] * len(ENDS), *([ends[tokens][end] for end in ENDS] for tokens in lengths)], axis=0)
    samples = up_to.sum(axis=1)
    if samples[-1] < DECILES:
        return []
    borders = samples[-1] * np.arange(DECILES + 1) / DECILES
    at_borders = np.stack([np.interp(borders, samples, of_end) for of_end in up_to.T], axis=1)
    shares = np.diff(at_borders, axis=0).clip(0) / (samples[-1] / DECILES)
    longest = [lengths[index] for index in np.searchsorted(samples[1:], borders[1:] - 1e-9)]
    return [(tokens, dict(zip(ENDS, part, strict=True))) for tokens, part in zip(longest, shares.tolist(), strict=True)]
