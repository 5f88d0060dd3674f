"""Computes and describes the metrics of `metrics.jsonl`, one object per finished step, and reads the file."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev

from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Health, StepReport
from asyncrl.telemetry.jsonl import Object, read_lines
from asyncrl.telemetry.state_clock import STATES

Metrics = Mapping[str, float]

METRICS: dict[str, str] = {
    "step": "training iterations so far, this one included; one that trained nothing is tried again",
    "time": "seconds since this incarnation of the run began",
    "incarnation": "how often the run was resumed",
    "version": "version of the weights after the step",
    "reward/mean": "mean reward of the samples in the batch",
    "reward/std": "their standard deviation over the whole batch",
    "staleness/mean": "mean versions between sampling and training, over tokens in the loss",
    "staleness/max": "largest of them, measured by the trainer",
    "staleness/updates_max": "largest staleness in optimizer steps",
    "staleness/masked_fraction": "share of response tokens left out for their age",
    "staleness/expired": "samples dropped because no token was young enough",
    "staleness/cut_fraction": "share of trained samples whose group still had open members",
    "staleness/cut_baseline_gap": "baseline at an early cut minus that of the whole group; 0 when none finished",
    "staleness/wasted_tokens": "tokens sampled and never trained, those a correction left out included",
    "mask/stale_fraction": "share of the batch's response tokens masked as stale",
    "mask/truncated_fraction": "share masked because their completion was truncated",
    "perf/tokens_per_s": "trained tokens per second of wall clock",
    "policy/entropy": "mean entropy of the policy at the sampled tokens, in nats",
    "policy/kl_rollout_train": "mean KL from the engine's log-probs to the trainer's before the first update, in nats",
    "policy/ratio_mean": "mean ratio in the loss",
    "policy/ratio_max": "largest ratio in the loss",
    "policy/clip_frac": "share of tokens whose term a bound of the loss held",
    "policy/ess": "effective sample size of the importance weights, as a share",
    "policy/weight_mean": "mean importance weight in the loss, after truncation",
    "loss/policy": "policy term of the loss",
    "loss/kl": "KL term of the loss, 0 without a reference",
    "loss/entropy": "entropy bonus in the loss, 0 without one",
    "mask/rejected_fraction": "share of the tokens within the limit that a correction left out",
    "mismatch/kl": "KL per token from the policy that sampled to the one that trains, k3 estimate, in nats",
    "mismatch/ess": "effective share of tokens under the uncapped weights proximal / behaviour",
    "mismatch/sequence_ess": "effective share of completions under the products of these weights",
    **{
        f"mismatch/{weight}_{place}": f"{place} of the uncapped weights, {of}"
        for weight, of in (("weight", "per token"), ("sequence_weight", "per completion"))
        for place in ("p01", "p10", "p50", "p90", "p99", "max")
    },
    "completions/length_mean": "mean tokens of a completion",
    "completions/truncated_fraction": "share of completions that ended at the token cap",
    "grad_norm": "norm of the gradient before clipping",
    "learning_rate": "of the step's last update",
    "tokens/response": "response tokens in the batch",
    "tokens/trained": "those of them that updates learnt from, without those a correction left out",
}
"""Metrics of every line; a line of a step that trained nothing lacks what the trainer measures."""

CRITIC_METRICS: dict[str, str] = {
    "critic/updates": "optimizer steps of the critic, 0 when the batch taught it nothing; with a critic",
    "critic/loss": "clipped squared error of the values, mean over updates",
    "critic/clip_frac": "share of tokens whose value was held by value_clip",
    "critic/value_mean": "mean value of the tokens in the loss",
    "critic/return_mean": "mean of what they were to become",
    "critic/explained_variance": "1 - variance of return - value over that of the returns",
    "critic/staleness": "updates of the critic between judging a sample and learning from it, mean over tokens",
    "critic/grad_norm": "norm of its gradient before clipping",
    "critic/learning_rate": "of its last update",
}

FURTHER_METRICS: dict[str, str] = {
    "reward/group_std": "standard deviation of rewards within a group, mean over groups of two or more in the batch",
    "reward/equal_groups": "share of these groups whose samples all got the same reward",
    "reward/<term>": "mean of one reward function, or of one of its terms",
    "policy/logprob_difference_max": "largest |trainer's - engine's log-prob| in what current weights alone sampled",
    "mismatch/canary": "largest difference of a log-prob between engine and trainer with the same weights, in nats",
    "policy/kl_reference": "mean of current - reference log-prob, in nats; with a reference",
    "policy/kl_coefficient": "of the KL term in this step; with a reference",
    **CRITIC_METRICS,
    **{f"cost_{name}": f"{name} of the cost critic" for name in CRITIC_METRICS},
    "cost/mean": "mean cost of the samples in the batch; with a cost service",
    "cost/<term>": "mean of one cost function, or of one of its terms",
    "cost/multiplier": "what costs were weighed with in this step",
    "policy/pretrain_loss": "mean cross-entropy of this step's texts of task.pretrain, in nats; with a coefficient",
    "sampling/accepted": "share of samples whose group had differing rewards, of the last 1024; dynamic sampling only",
    "sampling/accepted/<decile>": "the same by length, d1 the shortest",
    "staleness/trained_samples/<decile>": "share of samples that trained, by length, d1 the shortest, of ten or more",
    "staleness/trained_tokens/<decile>": "share of their tokens that trained, without those a correction left out",
    "staleness/redone/<decile>": "share of samples sampled more than once, by length; when one was",
    "data/dropped/<reason>": "samples dropped since the step before",
    "skipped/<reason>": "1 in the line of a step that trained nothing, and why; the next attempt has the same number",
    "time/<service>/<state>": "share of wall clock since the step before, mean over the service's workers",
    "eval/reward/mean": "of held-out prompts, sampled by eval/version; with the step after it is known",
    "eval/reward/stderr": "its standard error over prompts",
    "eval/cost/mean": "of the same answers, where answers have costs",
    "eval/version": "version of the weights that were evaluated",
}
"""Metrics of lines to which they apply; a sink gets them under the same names."""

COSTS = "cost/"
"""Prefix of the terms of a sample's cost, among those of its reward."""


def read_metrics(path: Path) -> list[Object]:
    """Returns one object per step, in order. The latest line of a step counts: a resumed run repeats steps after its
    checkpoint, and a step that trained nothing is tried again with other samples. The void lines stay in the file."""
    surviving: list[Object] = []
    for line in read_lines(path):
        while surviving and surviving[-1]["step"] >= line["step"]:
            surviving.pop()
        surviving.append(line)
    return surviving


def missing_metrics(metrics: Metrics) -> list[str]:
    """Returns the names of METRICS that `metrics` lacks."""
    return [name for name in METRICS if name not in metrics]


def unknown_metrics(metrics: Metrics) -> list[str]:
    """Returns the names in `metrics` that match no entry of METRICS or FURTHER_METRICS."""
    further = re.compile("|".join(re.sub(r"<\w+>", "[^/]+(/[^/]+)?", name) for name in FURTHER_METRICS))
    return [name for name in metrics if name not in METRICS and not further.fullmatch(name)]


def batch_metrics(batch: BatchRef) -> dict[str, float]:
    """Computes `reward/*`, `cost/*` and `completions/*` of the samples of one step."""
    rewards = [row.reward for row in batch if row.reward is not None]
    costs = [row.cost for row in batch if row.cost is not None]
    return {
        **({"cost/mean": fmean(costs)} if costs else {}),
        "reward/mean": _mean(rewards),
        "reward/std": pstdev(rewards) if rewards else float("nan"),
        **_within_groups(batch),
        "completions/length_mean": _mean([row.tokens for row in batch]),
        "completions/truncated_fraction": _mean([row.finish == "length" for row in batch]),
    }


def _within_groups(batch: BatchRef) -> dict[str, float]:
    """Computes metrics of the groups with at least two rewards; returns none when there is no such group."""
    groups: dict[int, list[float]] = {}
    for row in batch:
        if row.reward is not None:
            groups.setdefault(row.group, []).append(row.reward)
    deviations = [pstdev(rewards) for rewards in groups.values() if len(rewards) > 1]
    if not deviations:
        return {}
    equal = fmean(deviation == 0 for deviation in deviations)
    return {"reward/group_std": fmean(deviations), "reward/equal_groups": equal}


def term_metric(term: str) -> str:
    """Returns the metric name for the mean of a score's term; terms of costs have their own prefix."""
    return term if term.startswith(COSTS) else f"reward/{term}"


def step_of(report: StepReport) -> int:
    """Returns the number of a step: the version it led to or, when it trained nothing, would have led to."""
    return report.version + bool(report.skipped)


def report_metrics(report: StepReport, seconds: float) -> dict[str, float]:
    """Returns the trainer's measurements, its masks as shares, and its rate.

    Args:
        seconds: wall clock since the end of the previous step.
    """
    trained = sum(sample.trained for sample in report.samples)
    total = trained + sum(sample.masked + sample.rejected for sample in report.samples)
    masked = Counter[str]()
    for sample in report.samples:
        masked[sample.reason] += sample.masked
    return {
        **report.metrics,
        "version": report.version,
        "mask/stale_fraction": masked["stale"] / max(1, total),
        "mask/truncated_fraction": masked["truncated"] / max(1, total),
        "perf/tokens_per_s": trained / seconds if seconds > 0 else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")


class TimeShares:
    """Turns the running totals of workers into `time/<service>/<state>` for the time between two calls."""

    def __init__(self) -> None:
        self._before: dict[str, Health] = {}

    def since_last(self, healths: Sequence[Health]) -> dict[str, float]:
        """Returns shares of wall clock by service and state, mean over workers; with `unaccounted` they sum to 1."""
        by_service: dict[str, list[dict[str, float]]] = {}
        for health in healths:
            by_service.setdefault(health.service, []).append(self._shares(health))
        self._before = {health.instance: health for health in healths}
        return {
            f"time/{service}/{state}": fmean(worker[state] for worker in workers)
            for service, workers in by_service.items()
            for state in (*STATES, "unaccounted")
        }

    def _shares(self, health: Health) -> dict[str, float]:
        before = self._before.get(health.instance)
        wall, seconds = (before.wall, before.seconds) if before else (0.0, {})
        passed = max(health.wall - wall, 1e-9)
        shares: dict[str, float] = {
            state: (health.seconds.get(state, 0.0) - seconds.get(state, 0.0)) / passed for state in STATES
        }
        return {**shares, "unaccounted": 1.0 - sum(shares.values())}
