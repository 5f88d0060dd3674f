"""Rules about single sections: `[model]`, `[weights]`, `[acting]` and the optimizer; stored samples, `[feedback]`,
`[telemetry]` and `[evaluate]`."""

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import suppress

from asyncrl.config.experiment import Experiment
from asyncrl.config.placement import ONE_REPLICA, PlacedWorker, Placement, layouts
from asyncrl.config.problems import Problem, wrong
from asyncrl.config.sections.evaluate_config import EvaluateConfig, HeldOutSet
from asyncrl.config.sections.training_config import OPTIMIZERS, SHARDED, option_mistakes, rate_mistake
from asyncrl.errors import ConfigError
from asyncrl.protocols.weight_transports import TRANSPORTS


def model_problems(config: Experiment) -> Iterator[Problem]:
    """Yields warnings about values that nothing reads, and about what adapters do not change."""
    model = config.model
    critic = config.algorithm.advantage == "gae"
    if model.float32_head and model.dtype == config.training.precision == "float32":
        text = "it changes nothing, because everything is computed in float32 already: remove float32_head"
        yield Problem("model.float32_head", "", text, ("model.dtype", "training.precision"), is_warning=True)
    if model.lora is not None and critic:
        text = """the policy has adapters, but a critic trains all weights of its own model, which takes the memory
            of full training; and critics read reference log-probs, so those come from a service: write preset =
            "grpo" to save that memory"""
        yield wrong("model.lora algorithm.advantage", text, is_warning=True)
    yield from _unread_reference_keys(config)


def _unread_reference_keys(config: Experiment) -> Iterator[Problem]:
    """Yields a warning for each key of a reference service that is not started."""
    if config.reference_by_service:
        return
    text = "nothing reads it with algorithm.kl = 0, which needs no reference model: remove it, or write algorithm.kl"
    other = "algorithm.kl"
    if config.algorithm.kl > 0:
        text = "nothing reads it with model.lora: the trainer computes the reference log-probs; remove it"
        other = "model.lora"
    for key in sorted(config.reference.model_dump(exclude_defaults=True)):
        yield Problem(f"reference.{key}", "", text, (other,), is_warning=True)


def replay_problems(config: Experiment) -> Iterator[Problem]:
    """Yields why the experts that training replays would not be recorded."""
    key = "training.router_replay"
    generation = config.generation
    if config.reference.router_replay and not config.training.router_replay:
        text = "generation records experts only with training.router_replay: write that too, or remove it"
        yield Problem("reference.router_replay", "", text, (key,))
    if not config.training.router_replay:
        return
    if not generation.engine_facts.is_own:
        yield Problem(
            key, "", 'the torch engine records experts: write generation.engine = "torch"', ("generation.engine",)
        )
    if generation.stored_samples:
        text = "stored samples have no record of experts: remove one of them"
        yield Problem(key, "", text, ("generation.stored_samples",))


def unread_devices(config: Experiment) -> Iterator[Problem]:
    """Yields a warning for each device on which nothing would compute."""
    for name, section in config.scorers.items():
        if section.device != "cpu" and not section.model and not section.pool:
            text = f"functions run in child processes on the CPU, and there is no {name}.model: remove it"
            yield wrong(f"{name}.device {name}.model", text, is_warning=True)


def optimizer_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what is wrong with the optimizer, and warnings about values that it does not read."""
    training = config.training
    name = training.optimizer
    kind = OPTIMIZERS[training.optimizer]
    for mistake in option_mistakes(name, training.optimizer_options):
        yield Problem("training.optimizer_options", "", mistake, ("training.optimizer",))
    for key, is_read in (("weight_decay", kind.weight_decay), ("betas", kind.betas)):
        if not is_read and getattr(training, key) != type(training).model_fields[key].default:
            text = f'nothing reads it with optimizer = "{name}": remove it'
            yield wrong(f"training.{key} training.optimizer", text, is_warning=True)
    for service, layout in layouts(config).items():
        axis = next((each for each in ("shard", "tp", "pp", "ep") if getattr(layout, each) > 1), "")
        if service in ONE_REPLICA and axis and name not in SHARDED:
            text = f"{name} is not supported with {service}.layout.{axis}: write {' or '.join(SHARDED)}, or layout.dp"
            yield wrong(f"training.optimizer {service}.layout", text)
    yield from _rate_problems(config)
    yield from _package_problems(config)


def _rate_problems(config: Experiment) -> Iterator[Problem]:
    """Yields a problem for each learning rate, of the policy and of critics, that breaks a model."""
    training = config.training
    reaction = config.guards.learning_rate
    critics = {"critic": config.critic, "cost_critic": config.cost_critic}
    rates = {"training": training.learning_rate}
    rates |= {name: own.rate(training.learning_rate) for name, own in critics.items() if name in layouts(config)}
    for name, rate in rates.items() if reaction != "off" else ():
        if mistake := rate_mistake(training.optimizer, rate, training.max_grad_norm):
            many = " (by default it is ten times the policy's)" if name != "training" else ""
            text = f'{mistake}{many} (experiments have 1e-6 to 1e-3 with AdamW), or guards.learning_rate = "off"'
            others = ("guards.learning_rate",)
            yield Problem(f"{name}.learning_rate", "", text, others, is_warning=reaction == "warn")


def _package_problems(config: Experiment) -> Iterator[Problem]:
    """Yields a problem of an optimizer that the installed version of its package does not have, or not for CPUs."""
    kind = OPTIMIZERS[config.training.optimizer]
    package = kind.module.partition(".")[0]
    if kind.since is None:
        return
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):  # What is missing, `missing_packages` says.
        version = importlib.metadata.version(package)
        if tuple(map(int, version.split(".")[:2])) < kind.since:
            text = f"""{package} {version} is installed, and {kind.name} is supported from {package}
                {".".join(map(str, kind.since))} on: install that or a newer one"""
            yield wrong("training.optimizer", text)


def weights_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what is wrong with the section, and warnings about values that nothing reads."""
    section = config.weights
    engine = config.generation.engine_facts
    if not engine.reads(section.transport):
        ways = " or ".join(f'"{each}"' for each in engine.transports)
        text = f"{engine.title} reads new weights from the shared memory of its host: write {ways}"
        yield wrong("weights.transport generation.engine", text)
    transport = TRANSPORTS[section.transport]
    if section.codec != "dense" and not transport.encodes:
        text = 'only weights that cross a network are encoded: remove it, or write weights.transport = "tcp"'
        yield wrong("weights.codec weights.transport", text, is_warning=True)
    if section.codec in ("bfloat16", "float16") and config.model.dtype == "bfloat16":
        text = "weights of bfloat16 have as few bytes already: remove it"
        yield wrong("weights.codec model.dtype", text, is_warning=True)
    yield from _device_problems(config)
    if section.folder and not transport.in_folder:
        text = 'nothing reads it: remove it, or write weights.transport = "file"'
        yield wrong("weights.folder weights.transport", text, is_warning=True)


def _device_problems(config: Experiment) -> Iterator[Problem]:
    """Yields a problem when a named transport cannot work between the devices of the trainer and of all that read its
    weights."""
    named = config.weights.transport
    transport = TRANSPORTS[named]
    keys = tuple(f"{name}.{'pool' if getattr(config, name).pool else 'device'}" for name in ("training", "generation"))
    try:
        placement = Placement.of(config)
    except ConfigError:  # Rules of pools say why.
        return
    trainer = placement.trainer
    readers = placement.readers or (placement.trainer,)
    sharing = [each for each in placement.readers if each.shares_gpu(trainer)]
    apart = [each for each in placement.readers if each not in sharing]
    on_cpu, on_gpu = ([each for each in readers if each.on_gpu == is_on] for is_on in (False, True))
    text = ""
    if transport.on == "gpu" and (on_cpu or not trainer.on_gpu):
        found = _found(trainer, (on_cpu or readers)[0])
        text = f'"{named}" moves weights between GPUs, but {found}: write "auto", or "gloo" for its twin on CPUs'
    elif transport.same_device is False and sharing:
        found = _found(trainer, sharing[0])
        other = "auto" if apart else "cuda_ipc"
        found = f"{found}, and {named.upper()} wants one GPU for each of its ranks"
        text = f'{found}: write "{other}", or give them different devices'
    elif transport.same_device and apart:
        found = _found(trainer, apart[0])
        other = "auto" if sharing else "nccl"
        text = f'{found}, and "{named}" reads memory of one GPU: write "{other}", or give them one device'
    elif transport.on == "cpu" and (on_gpu or trainer.on_gpu):
        text = f'"{named}" moves weights between CPUs, but {_found(trainer, (on_gpu or readers)[0])}: write "auto"'
    if text:
        yield Problem("weights.transport", "", text, keys)
    if transport.same_device and config.fleet.wire == "inproc":
        text = 'a process cannot open CUDA memory of its own: write "auto", or another fleet.wire'
        yield wrong("weights.transport fleet.wire", text)


def _found(trainer: PlacedWorker, reader: PlacedWorker) -> str:
    """Says where both are, with their hosts where these have names."""
    one, other = (f"{' '.join(each.devices)}{f' of {each.host}' if each.host else ''}" for each in (trainer, reader))
    who = reader.service if not reader.number else reader.name
    return f"training is on {one}, {who} on {other}"


def lockstep_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what training and sampling in lockstep does not fit."""
    if config.staleness.admission != "lockstep":
        return
    if config.staleness.limit != 1:
        text = "in lockstep each batch is sampled by the version before the one that trains it: write limit = 1"
        yield wrong("staleness.limit staleness.admission", text)
    if config.acting.env:
        text = 'policies that act do not stop at the end of a batch: write admission = "full"'
        yield wrong("staleness.admission acting.env", text)


def acting_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what contradicts a policy that acts, and warnings about values that nothing reads without one."""
    settings = config.acting
    if not settings.env:
        for key in sorted(settings.model_dump(exclude_defaults=True)):
            text = "nothing reads it without an environment to act in: remove it, or write acting.env"
            yield wrong(f"acting.{key} acting.env", text, is_warning=True)
        if config.evaluate.episodes:
            text = "a language model is evaluated on held-out prompts: write evaluate.prompts, or acting.env"
            yield wrong("evaluate.episodes acting.env", text)
        return
    if config.task.samples_per_prompt != settings.environments:
        text = f"a group has a sample of each environment: write {settings.environments}, or leave it out"
        yield wrong("task.samples_per_prompt acting.environments", text)
    if config.training.layout.size > 1:
        yield wrong("training.layout acting.env", "the trainer of a small network has one rank: remove it")
    if config.fleet.joined:
        yield wrong("fleet.joined acting.env", "acting workers and their trainer are started on this host: remove it")
    if settings.environments < settings.children:
        text = f"there are {settings.environments} environments, and each child has one at least: write fewer"
        yield wrong("acting.children acting.environments", text)
    yield from _without_language(config)


def _without_language(config: Experiment) -> Iterator[Problem]:
    """Yields what only samples of text have."""
    chosen = {
        "reward.functions": config.reward.functions,
        "reward.model": config.reward.model,
        "environment.use": config.environment.use,
        "feedback.ask": config.feedback.asks,
        "evaluate.prompts": config.evaluate.prompts,
        "evaluate.sets": config.evaluate.sets,
        "model.lora": config.model.lora,
        "task.pretrain": config.task.pretrain,
        "generation.engine": not config.generation.engine_facts.is_own,
    }
    for key, value in chosen.items():
        if value:
            text = "a policy that acts gets its rewards from its environment, and samples no text: remove it"
            yield Problem(key, "", text, ("acting.env",))
    evaluate = config.evaluate
    usual = EvaluateConfig()
    for key in ("samples", "temperature", "replicas", "pool"):
        if getattr(evaluate, key) != getattr(usual, key):
            text = "one worker plays each episode of evaluate.episodes once, with the likeliest actions: remove it"
            yield wrong(f"evaluate.{key} acting.env", text)
    for section in ("generation", "training"):
        if getattr(config, section).device != "cpu":
            yield wrong(f"{section}.device acting.env", "a small network acts and trains on the CPU: remove it")


# Rules about what a run shows of itself: the page of live feedback, metrics, and evaluation.


LOOPBACK = ("127.0.0.1", "localhost", "::1")
HOST_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\[\]:/\s]+):(\d+)")
PASS_AT = re.compile(r"(?:(?P<set>[^/]+)/)?pass_at_(?P<k>\d+)(?:_low|_high)?")
SAME_SAMPLES = "at temperature 0 all samples of a prompt are the same; write samples = 1 or a temperature over 0"
SHARE_OF_CALL = 0.9
"""Share of fleet.call_deadline that a sample may wait for a person; the rest is for scoring it."""


def stored_sample_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what stored samples cannot stand in for."""
    key = "generation.stored_samples"
    if not config.generation.stored_samples:
        return
    if not config.generation.engine_facts.is_own:
        text = f'{config.generation.engine_facts.title} samples; stored samples need generation.engine = "torch"'
        yield Problem(key, "", text, ("generation.engine",))
    if config.environment.use:
        yield Problem(key, "", "episodes cannot be trained again from a file: remove one", ("environment.use",))
    if config.algorithm.advantage == "greedy":
        text = "a file has no greedy answers, which are this baseline: write another algorithm.advantage"
        yield Problem(key, "", text, ("algorithm.advantage",))


def feedback_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what is wrong with the section, and warnings about it."""
    section = config.feedback
    if not section.asks:
        for key in sorted(section.model_dump(exclude_defaults=True)):
            text = 'nothing reads it without feedback: remove it, or write feedback.ask = "rate"'
            yield wrong(f"feedback.{key} feedback.ask", text, is_warning=True)
        return
    if config.reward.replicas > 1:
        yield wrong("reward.replicas feedback.ask", "one worker serves the page and scores: write reward.replicas = 1")
    if section.deadline > (longest := SHARE_OF_CALL * config.fleet.call_deadline):
        text = f"a call is given up after fleet.call_deadline, so write {longest:g} or less, or a longer call_deadline"
        yield wrong("feedback.deadline fleet.call_deadline", text)
    if section.otherwise == "model" and not config.reward.model:
        text = 'there is no model: write reward.model, a folder made by "asyncrl preferences fit"'
        yield wrong("feedback.otherwise reward.model", text)
    if section.otherwise == "ignore" and _rates_held_out(config) and not config.reward.terms:
        text = """nobody rates held-out answers, so they have no reward: write otherwise = "constant" or "model",
            reward.functions, or no evaluate.prompts"""
        yield Problem("feedback.otherwise", "", " ".join(text.split()), ("evaluate.prompts",))
    yield from _pick_problems(config)
    if section.host not in LOOPBACK:
        text = "whoever reaches this address can read key and answers on their way: use a tunnel to 127.0.0.1"
        yield wrong("feedback.host", text, is_warning=True)


def _rates_held_out(config: Experiment) -> bool:
    """Returns whether held-out answers are scored as those of training are."""
    return any(not each.functions for each in config.evaluate.held_out)


def telemetry_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what is wrong with the address of metrics, and warns of one that others can listen to."""
    section = config.telemetry
    for key in ("wandb_project", "wandb_tags") if "wandb" not in section.sinks else ():
        if getattr(section, key):
            text = 'nothing reads it without the sink: remove it, or write telemetry.sinks = ["wandb"]'
            yield wrong(f"telemetry.{key} telemetry.sinks", text, is_warning=True)
    if section.otlp and not section.otlp.startswith(("http://", "https://")):
        yield Problem("telemetry.otlp", "", f"{section.otlp!r} is no URL: write one such as http://127.0.0.1:4318")
    elif section.otlp and not section.trace:
        yield wrong("telemetry.otlp telemetry.trace", "spans are those of the trace: write telemetry.trace = true")
    if not section.prometheus:
        if section.prometheus_token:
            text = "nothing reads it without an address: remove it, or write telemetry.prometheus"
            yield wrong("telemetry.prometheus_token telemetry.prometheus", text, is_warning=True)
        return
    found = HOST_PORT.fullmatch(section.prometheus)
    if not found or int(found[2]) > 65535:
        text = f"{section.prometheus!r} is no address: write HOST:PORT, such as 127.0.0.1:9400"
        yield wrong("telemetry.prometheus", text)
    elif found[1].strip("[]") not in LOOPBACK:
        if not section.prometheus_token:
            text = """other hosts reach this address, and everybody there would read the metrics: write
                telemetry.prometheus_token, a file with a token, or 127.0.0.1 and use a tunnel"""
            yield Problem("telemetry.prometheus", "", " ".join(text.split()), ("telemetry.prometheus_token",))
        else:
            text = "whoever reaches this address can read token and metrics on their way: use a tunnel to 127.0.0.1"
            yield wrong("telemetry.prometheus", text, is_warning=True)


def held_out_problems(config: Experiment) -> Iterator[Problem]:
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
            yield wrong("evaluate.sets", f"{each.name}: an answer is scored as a whole here; remove by_token = true")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            text = f"{each.name}: two functions are called {twice[0]!r}; give each its own `name`"
            yield wrong("evaluate.sets", text)
        if each.samples > 1 and each.temperature == 0:
            yield Problem("evaluate.sets", "", f"{each.name}: {SAME_SAMPLES}")
    if metric.startswith("eval/") and not evaluate.is_on:
        what, key = ("episodes", "episodes") if config.acting.env else ("held-out prompts", "prompts")
        text = f"nothing measures {metric} without {what}: write evaluate.{key}, or another metric"
        yield wrong(f"training.keep_best evaluate.{key}", text)
    yield from _best_of_pass_rates(config)


def _best_of_pass_rates(config: Experiment) -> Iterator[Problem]:
    """Yields that the best checkpoint is chosen by a pass@k that no evaluation measures."""
    found = PASS_AT.fullmatch(config.training.keep_best.removeprefix("-").removeprefix("eval/"))
    for each in config.evaluate.held_out if found else ():
        measured = [1 << n for n in range(each.samples.bit_length())] if each.samples > 1 else []
        if found and each.name == (found["set"] or "") and int(found["k"]) not in measured:
            which = f"measures pass@{', '.join(map(str, measured))} only" if measured else "has no pass@k"
            text = f"""nothing measures eval/{found[0]}: {each.section}.samples = {each.samples} {which}; write more
                samples"""
            yield wrong("training.keep_best evaluate.samples", text)


def _scored_alone(config: Experiment, held_out: HeldOutSet) -> Iterator[Problem]:
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


def _pick_problems(config: Experiment) -> Iterator[Problem]:
    if config.feedback.ask != "pick":
        return
    if config.algorithm.advantage == "greedy":
        text = 'a greedy answer has no pair to be compared with: write ask = "rate"'
        yield wrong("feedback.ask algorithm.advantage", text)
    elif config.task.samples_per_prompt % 2:
        text = "answers of one prompt are compared in pairs: write an even number"
        yield wrong("task.samples_per_prompt feedback.ask", text)
