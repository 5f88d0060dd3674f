"""Rules about what a run shows of itself: the page of live feedback, metrics, and evaluation."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.config.sections.evaluate_config import HeldOutSet

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HOST_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\[\]:/\s]+):(\d+)")
PASS_AT = re.compile(r"(?:(?P<set>[^/]+)/)?pass_at_(?P<k>\d+)(?:_low|_high)?")
SAME_SAMPLES = "at temperature 0 all samples of a prompt are the same; write samples = 1 or a temperature over 0"
SHARE_OF_CALL = 0.9
"""Share of fleet.call_deadline that a sample may wait for a person; the rest is for scoring it."""


def stored_sample_problems(config: "Config") -> Iterator[Problem]:
    """Yields what stored samples cannot stand in for."""
    key = "generation.stored_samples"
    if not config.generation.stored_samples:
        return
    if config.generation.engine == "vllm":
        text = 'vLLM samples; stored samples need generation.engine = "torch"'
        yield Problem(key, "", text, ("generation.engine",))
    if config.environment.use:
        yield Problem(key, "", "episodes cannot be trained again from a file: remove one", ("environment.use",))
    if config.algorithm.advantage == "greedy":
        text = "a file has no greedy answers, which are this baseline: write another algorithm.advantage"
        yield Problem(key, "", text, ("algorithm.advantage",))


def feedback_problems(config: "Config") -> Iterator[Problem]:
    """Yields what is wrong with the section, and warnings about it."""
    section = config.feedback
    if not section.asks:
        for key in sorted(section.model_dump(exclude_defaults=True)):
            text = 'nothing reads it without feedback: remove it, or write feedback.ask = "rate"'
            yield Problem(f"feedback.{key}", "", text, ("feedback.ask",), is_warning=True)
        return
    if config.reward.replicas > 1:
        text = "one worker serves the page and scores: write reward.replicas = 1"
        yield Problem("reward.replicas", "", text, ("feedback.ask",))
    if section.deadline > (longest := SHARE_OF_CALL * config.fleet.call_deadline):
        text = f"a call is given up after fleet.call_deadline, so write {longest:g} or less, or a longer call_deadline"
        yield Problem("feedback.deadline", "", text, ("fleet.call_deadline",))
    if section.otherwise == "model" and not config.reward.model:
        text = 'there is no model: write reward.model, a folder made by "asyncrl preferences fit"'
        yield Problem("feedback.otherwise", "", text, ("reward.model",))
    if section.otherwise == "ignore" and _rates_held_out(config) and not config.reward.terms:
        text = """nobody rates held-out answers, so they have no reward: write otherwise = "constant" or "model",
            reward.functions, or no evaluate.prompts"""
        yield Problem("feedback.otherwise", "", " ".join(text.split()), ("evaluate.prompts",))
    yield from _pick_problems(config)
    if section.host not in LOOPBACK:
        text = "whoever reaches this address can read key and answers on their way: use a tunnel to 127.0.0.1"
        yield Problem("feedback.host", "", text, is_warning=True)


def _rates_held_out(config: "Config") -> bool:
    """Returns whether held-out answers are scored as those of training are."""
    return any(not each.functions for each in config.evaluate.held_out)


def telemetry_problems(config: "Config") -> Iterator[Problem]:
    """Yields what is wrong with the address of metrics, and warns of one that others can listen to."""
    section = config.telemetry
    for key in ("wandb_project", "wandb_tags") if "wandb" not in section.sinks else ():
        if getattr(section, key):
            text = 'nothing reads it without the sink: remove it, or write telemetry.sinks = ["wandb"]'
            yield Problem(f"telemetry.{key}", "", text, ("telemetry.sinks",), is_warning=True)
    if section.otlp and not section.otlp.startswith(("http://", "https://")):
        yield Problem("telemetry.otlp", "", f"{section.otlp!r} is no URL: write one such as http://127.0.0.1:4318")
    elif section.otlp and not section.trace:
        text = "spans are those of the trace: write telemetry.trace = true"
        yield Problem("telemetry.otlp", "", text, ("telemetry.trace",))
    if not section.prometheus:
        if section.prometheus_token:
            text = "nothing reads it without an address: remove it, or write telemetry.prometheus"
            yield Problem("telemetry.prometheus_token", "", text, ("telemetry.prometheus",), is_warning=True)
        return
    found = HOST_PORT.fullmatch(section.prometheus)
    if not found or int(found[2]) > 65535:
        text = f"{section.prometheus!r} is no address: write HOST:PORT, such as 127.0.0.1:9400"
        yield Problem("telemetry.prometheus", "", text)
    elif found[1].strip("[]") not in LOOPBACK:
        if not section.prometheus_token:
            text = """other hosts reach this address, and everybody there would read the metrics: write
                telemetry.prometheus_token, a file with a token, or 127.0.0.1 and use a tunnel"""
            yield Problem("telemetry.prometheus", "", " ".join(text.split()), ("telemetry.prometheus_token",))
        else:
            text = "whoever reaches this address can read token and metrics on their way: use a tunnel to 127.0.0.1"
            yield Problem("telemetry.prometheus", "", text, is_warning=True)


def held_out_problems(config: "Config") -> Iterator[Problem]:
    """Yields what is wrong with held-out sets, and with the metric that a best checkpoint is chosen by."""
    evaluate = config.evaluate
    metric = config.training.keep_best.removeprefix("-")
    if evaluate.samples > 1 and evaluate.temperature == 0:
        yield Problem("evaluate.samples", "", SAME_SAMPLES, ("evaluate.temperature",))
    for each in evaluate.held_out:
        yield from _scored_alone(config, each)
    for each in filter(lambda each: each.name, evaluate.held_out):
        names = [function.term for function in each.functions]
        if any(function.by_token for function in each.functions):
            text = f"{each.name}: an answer is scored as a whole here; remove by_token = true"
            yield Problem("evaluate.sets", "", text)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            text = f"{each.name}: two functions are called {twice[0]!r}; give each its own `name`"
            yield Problem("evaluate.sets", "", text)
        if each.samples > 1 and each.temperature == 0:
            yield Problem("evaluate.sets", "", f"{each.name}: {SAME_SAMPLES}")
    if metric.startswith("eval/") and not evaluate.is_on:
        what, key = ("episodes", "episodes") if config.acting.env else ("held-out prompts", "prompts")
        text = f"nothing measures {metric} without {what}: write evaluate.{key}, or another metric"
        yield Problem("training.keep_best", "", text, (f"evaluate.{key}",))
    yield from _best_of_pass_rates(config)


def _best_of_pass_rates(config: "Config") -> Iterator[Problem]:
    """Yields that the best checkpoint is chosen by a pass@k that no evaluation measures."""
    found = PASS_AT.fullmatch(config.training.keep_best.removeprefix("-").removeprefix("eval/"))
    for each in config.evaluate.held_out if found else ():
        measured = [1 << n for n in range(each.samples.bit_length())] if each.samples > 1 else []
        if found and each.name == (found["set"] or "") and int(found["k"]) not in measured:
            which = f"measures pass@{', '.join(map(str, measured))} only" if measured else "has no pass@k"
            text = (
                f"nothing measures eval/{found[0]}: {each.section}.samples = {each.samples} {which}; write more samples"
            )
            yield Problem("training.keep_best", "", text, ("evaluate.samples",))


def _scored_alone(config: "Config", held_out: "HeldOutSet") -> Iterator[Problem]:
    """Yields a warning where functions compare the samples of a group, and a group of this set has one."""
    found = held_out.functions or [each for section in config.scorers.values() for each in section.functions]
    grouped = [each.term for each in found if each.group]
    if not grouped or held_out.samples > 1:
        return
    own = f"evaluate.sets.{held_out.name or 'NAME'}"
    text = (
        f"{grouped[0]} scores groups, and a held-out prompt has one sample: write {held_out.section}.samples = "
        f'{config.task.samples_per_prompt} with a temperature over 0, or {own} with functions = ["exact_match"]'
    )
    yield Problem("evaluate.sets" if held_out.name else "evaluate.samples", "", text, is_warning=True)


def _pick_problems(config: "Config") -> Iterator[Problem]:
    if config.feedback.ask != "pick":
        return
    if config.algorithm.advantage == "greedy":
        text = 'a greedy answer has no pair to be compared with: write ask = "rate"'
        yield Problem("feedback.ask", "", text, ("algorithm.advantage",))
    elif config.task.samples_per_prompt % 2:
        text = "answers of one prompt are compared in pairs: write an even number"
        yield Problem("task.samples_per_prompt", "", text, ("feedback.ask",))
