"""Rules about the sections `[model]`, `[weights]` and `[acting]`, and about the optimizer."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from asyncrl.config.placement import PlacedWorker, Placement
from asyncrl.config.problems import Problem
from asyncrl.config.sections.evaluate_config import EvaluateConfig
from asyncrl.config.sections.training.optimizers import OPTIMIZERS, SHARDED, option_mistakes, rate_mistake
from asyncrl.config.service_placement import ONE_REPLICA, layouts
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


def model_problems(config: "Config") -> Iterator[Problem]:
    """Yields warnings about values that nothing reads, and about what adapters do not change."""
    model = config.model
    critic = config.algorithm.advantage == "gae"
    if model.float32_head and model.dtype == config.training.precision == "float32":
        text = "it changes nothing, because everything is computed in float32 already: remove float32_head"
        yield Problem("model.float32_head", "", text, ("model.dtype", "training.precision"), is_warning=True)
    if model.lora is not None and critic:
        text = (
            "the policy has adapters, but a critic trains all weights of its own model, which takes the memory of full "
            'training; and critics read reference log-probs, so those come from a service: write preset = "grpo" to '
            "save that memory"
        )
        yield Problem("model.lora", "", text, ("algorithm.advantage",), is_warning=True)
    yield from _unread_reference_keys(config)


def _unread_reference_keys(config: "Config") -> Iterator[Problem]:
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


def replay_problems(config: "Config") -> Iterator[Problem]:
    """Yields why the experts that training replays would not be recorded."""
    key = "training.router_replay"
    generation = config.generation
    if config.reference.router_replay and not config.training.router_replay:
        text = "generation records experts only with training.router_replay: write that too, or remove it"
        yield Problem("reference.router_replay", "", text, (key,))
    if not config.training.router_replay:
        return
    if generation.engine == "vllm":
        yield Problem(
            key, "", 'the torch engine records experts: write generation.engine = "torch"', ("generation.engine",)
        )
    if generation.stored_samples:
        text = "stored samples have no record of experts: remove one of them"
        yield Problem(key, "", text, ("generation.stored_samples",))


def unread_devices(config: "Config") -> Iterator[Problem]:
    """Yields a warning for each device on which nothing would compute."""
    for name, section in config.scorers.items():
        if section.device != "cpu" and not section.model and not section.pool:
            text = f"functions run in child processes on the CPU, and there is no {name}.model: remove it"
            yield Problem(f"{name}.device", "", text, (f"{name}.model",), is_warning=True)


def optimizer_problems(config: "Config") -> Iterator[Problem]:
    """Yields what is wrong with the optimizer, and warnings about values that it does not read."""
    training = config.training
    name = training.optimizer
    kind = OPTIMIZERS[training.optimizer]
    for mistake in option_mistakes(name, training.optimizer_options):
        yield Problem("training.optimizer_options", "", mistake, ("training.optimizer",))
    for key, is_read in (("weight_decay", kind.weight_decay), ("betas", kind.betas)):
        if not is_read and getattr(training, key) != type(training).model_fields[key].default:
            text = f'nothing reads it with optimizer = "{name}": remove it'
            yield Problem(f"training.{key}", "", text, ("training.optimizer",), is_warning=True)
    for service, layout in layouts(config).items():
        axis = next((each for each in ("shard", "tp", "pp", "ep") if getattr(layout, each) > 1), "")
        if service in ONE_REPLICA and axis and name not in SHARDED:
            text = f"{name} is not supported with {service}.layout.{axis}: write {' or '.join(SHARDED)}, or layout.dp"
            yield Problem("training.optimizer", "", text, (f"{service}.layout",))
    yield from _rate_problems(config)
    yield from _package_problems(config)


def _rate_problems(config: "Config") -> Iterator[Problem]:
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


def _package_problems(config: "Config") -> Iterator[Problem]:
    """Yields a problem of an optimizer that the installed version of its package does not have, or not for CPUs."""
    kind = OPTIMIZERS[config.training.optimizer]
    package = kind.module.partition(".")[0]
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):  # What is missing, `missing_packages` says.
        version = importlib.metadata.version(package)
        if tuple(map(int, version.split(".")[:2])) < kind.since:
            text = (
                f"{package} {version} is installed, and {kind.name} is supported from {package} "
                f"{'.'.join(map(str, kind.since))} on: install that or a newer one"
            )
            yield Problem("training.optimizer", "", text)


def weights_problems(config: "Config") -> Iterator[Problem]:
    """Yields what is wrong with the section, and warnings about values that nothing reads."""
    section = config.weights
    if config.generation.engine == "vllm" and section.transport not in ("auto", "shm"):
        text = 'vLLM reads new weights from the shared memory of its host: write "auto" or "shm"'
        yield Problem("weights.transport", "", text, ("generation.engine",))
    if section.codec != "dense" and section.transport not in ("auto", "tcp"):
        text = 'only weights that cross a network are encoded: remove it, or write weights.transport = "tcp"'
        yield Problem("weights.codec", "", text, ("weights.transport",), is_warning=True)
    if section.codec in ("bfloat16", "float16") and config.model.dtype == "bfloat16":
        text = "weights of bfloat16 have as few bytes already: remove it"
        yield Problem("weights.codec", "", text, ("model.dtype",), is_warning=True)
    yield from _device_problems(config)
    if section.folder and section.transport != "file":
        text = 'nothing reads it: remove it, or write weights.transport = "file"'
        yield Problem("weights.folder", "", text, ("weights.transport",), is_warning=True)


def _device_problems(config: "Config") -> Iterator[Problem]:
    """Yields a problem when a named transport cannot work between the devices of the trainer and of all that read its
    weights."""
    named = config.weights.transport
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
    if named in ("nccl", "cuda_ipc") and (on_cpu or not trainer.on_gpu):
        found = _found(trainer, (on_cpu or readers)[0])
        text = f'"{named}" moves weights between GPUs, but {found}: write "auto", or "gloo" for its twin on CPUs'
    elif named == "nccl" and sharing:
        found = _found(trainer, sharing[0])
        other = "auto" if apart else "cuda_ipc"
        text = f'{found}, and NCCL wants one GPU for each of its ranks: write "{other}", or give them different devices'
    elif named == "cuda_ipc" and apart:
        found = _found(trainer, apart[0])
        other = "auto" if sharing else "nccl"
        text = f'{found}, and "cuda_ipc" reads memory of one GPU: write "{other}", or give them one device'
    elif named == "gloo" and (on_gpu or trainer.on_gpu):
        text = f'"gloo" moves weights between CPUs, but {_found(trainer, (on_gpu or readers)[0])}: write "auto"'
    if text:
        yield Problem("weights.transport", "", text, keys)
    if named == "cuda_ipc" and config.fleet.wire == "inproc":
        text = 'a process cannot open CUDA memory of its own: write "auto", or another fleet.wire'
        yield Problem("weights.transport", "", text, ("fleet.wire",))


def _found(trainer: PlacedWorker, reader: PlacedWorker) -> str:
    """Says where both are, with their hosts where these have names."""
    one, other = (f"{' '.join(each.devices)}{f' of {each.host}' if each.host else ''}" for each in (trainer, reader))
    who = reader.service if not reader.number else reader.name
    return f"training is on {one}, {who} on {other}"


def lockstep_problems(config: "Config") -> Iterator[Problem]:
    """Yields what training and sampling in lockstep does not fit."""
    if config.staleness.admission != "lockstep":
        return
    if config.staleness.limit != 1:
        text = "in lockstep each batch is sampled by the version before the one that trains it: write limit = 1"
        yield Problem("staleness.limit", "", text, ("staleness.admission",))
    if config.acting.env:
        text = 'policies that act do not stop at the end of a batch: write admission = "full"'
        yield Problem("staleness.admission", "", text, ("acting.env",))


def acting_problems(config: "Config") -> Iterator[Problem]:
    """Yields what contradicts a policy that acts, and warnings about values that nothing reads without one."""
    settings = config.acting
    if not settings.env:
        for key in sorted(settings.model_dump(exclude_defaults=True)):
            text = "nothing reads it without an environment to act in: remove it, or write acting.env"
            yield Problem(f"acting.{key}", "", text, ("acting.env",), is_warning=True)
        if config.evaluate.episodes:
            text = "a language model is evaluated on held-out prompts: write evaluate.prompts, or acting.env"
            yield Problem("evaluate.episodes", "", text, ("acting.env",))
        return
    if config.task.samples_per_prompt != settings.environments:
        text = f"a group has a sample of each environment: write {settings.environments}, or leave it out"
        yield Problem("task.samples_per_prompt", "", text, ("acting.environments",))
    if config.training.layout.size > 1:
        text = "the trainer of a small network has one rank: remove it"
        yield Problem("training.layout", "", text, ("acting.env",))
    if config.fleet.joined:
        text = "acting workers and their trainer are started on this host: remove it"
        yield Problem("fleet.joined", "", text, ("acting.env",))
    if settings.environments < settings.children:
        text = f"there are {settings.environments} environments, and each child has one at least: write fewer"
        yield Problem("acting.children", "", text, ("acting.environments",))
    yield from _without_language(config)


def _without_language(config: "Config") -> Iterator[Problem]:
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
        "generation.engine": config.generation.engine != "torch",
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
            yield Problem(f"evaluate.{key}", "", text, ("acting.env",))
    for section in ("generation", "training"):
        if getattr(config, section).device != "cpu":
            text = "a small network acts and trains on the CPU: remove it"
            yield Problem(f"{section}.device", "", text, ("acting.env",))
