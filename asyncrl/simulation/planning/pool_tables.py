"""Writes a mapping as the tables of an experiment file: `[pools]`, and which service runs in which pool."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

from pydantic import ValidationError

from asyncrl.config.placement import layouts
from asyncrl.config.schema import Config
from asyncrl.config.sections.device_pools import GB
from asyncrl.config.sections.training_config import LayoutConfig, TrainingLayoutConfig
from asyncrl.config.toml_writer import value_text
from asyncrl.deploy.checks.memory_needs import TrainedModel, frozen_need, generation_need
from asyncrl.deploy.checks.run_prompts import RowLengths
from asyncrl.engines.generation.vllm.option_problems import cache_tokens
from asyncrl.engines.ranks.rank_limits import layout_refusals
from asyncrl.errors import ConfigError
from asyncrl.simulation.planning.formulas import Degrees
from asyncrl.simulation.planning.job_file import PlannedJob, StepWork
from asyncrl.simulation.planning.model_size import ModelSize
from asyncrl.simulation.planning.search import FoundMapping, PlacedSet
from asyncrl.simulation.planning.strategies import GENERATING, TRAINED, Layouts, Strategy, powers

Tables = dict[str, dict[str, Any]]
GPU = "cuda"
POLICY = ("actor", "training")
FROZEN = ("reference", "reward", "cost")
"""Roles whose models score and do not change."""
ALL_ROLES: Mapping[str, Mapping[str, Any]] = {
    "model": {"name": "m", "dtype": "bfloat16"},
    "algorithm": {"preset": "ppo", "kl": 0.1, "constraint": "lagrangian"},
    "reward": {"model": "m"},
    "cost": {"model": "m", "limit": 1.0},
}
"""Tables of an experiment in which each role has a service."""


def devices_of(found: FoundMapping) -> list[dict[str, tuple[int, ...]]]:
    """Returns the numbers of the GPUs of each set by host. Large sets get whole hosts first, and what is smaller than a
    host fills one in falling powers of two, so that every GPU is used once."""
    placed: list[dict[str, tuple[int, ...]]] = [{} for _ in found.sets]
    for group in found.job.groups:
        numbered = [(index, each) for index, each in enumerate(found.sets) if each.group is group]
        free = iter([(host, number) for host in group.hosts for number in range(group.each)])
        for index, each in sorted(numbered, key=lambda pair: -pair[1].gpus):
            for _ in range(each.gpus):
                host, number = next(free)
                placed[index][host] = (*placed[index].get(host, ()), number)
    return placed


def pool_tables(found: FoundMapping) -> str:
    """Returns TOML text: pools, and services in them with the layouts that were found. Raises ConfigError for a layout
    that no experiment has, which a search with `runs` leaves out."""
    spread = _is_spread(found.job)
    sections = list[str]()
    joined = dict[str, int]()
    for each in found.sets:
        for role, strategy in zip(each.roles, each.strategies, strict=True):
            tables = role_tables(role, strategy, found.job)
            note = ""
            if why := refusal(role, tables, found.job):
                if not _is_lone(role, found.job):
                    raise ConfigError(f"no experiment has the layout that was found for {role}, {strategy}: {why}")
                tables = {role: {}}
                note = f"  # has one rank where it joins, and not the layout found: {strategy}"
            for name, values in tables.items():
                joined[name] = _workers(values)
                keys = {"pool": pool_name(each)} | values
                sections += ["", f"[{name}]{note}", *(f"{key} = {value_text(value)}" for key, value in keys.items())]
    lines = [f"# {found.name}", f"# {found.job.tables.objective}: {found.predicted} s, predicted"]
    prompt = found.job.work.prompt_tokens
    lines.append(f'# The memory of devices is counted with model.dtype = "bfloat16", task.max_prompt_tokens = {prompt}')
    if spread:
        needed = f'fleet.wire = "tcp", fleet.listen, and fleet.joined = {value_text(joined)}'
        lines.append(f"# Workers join from these hosts, for which an experiment has {needed}")
    for each, hosts in zip(found.sets, devices_of(found), strict=True):
        lines += ["", *_pool(each, hosts, one_host=not spread)]
    return "\n".join([*lines, *sections]) + "\n"


def role_tables(role: str, strategy: Strategy, job: PlannedJob) -> Tables:
    """Returns the tables of an experiment that say in which layout the services of a role run, and the keys on which
    the memory of a policy rests."""
    generate = strategy.generate
    degrees = strategy.degrees
    work = job.work
    copies = degrees.dp // degrees.ep
    layout = {"pp": degrees.pp, "tp": degrees.tp, "shard": degrees.shard, "ep": degrees.ep, "dp": copies}
    found: Tables = {}
    if role in GENERATING:
        # Stages of workers that sample are no layout of an experiment, as a key that there is none of tells.
        stages = {"pp": generate.pp} if generate.pp > 1 else {}
        sampled = sampling_keys(_size_of(role, job), generate.tp, strategy.room, work)
        found["generation"] = {"replicas": generate.dp, "max_new_tokens": work.longest_answer} | sampled | stages
    if role in FROZEN:  # Copies are replicas, which answer each for itself.
        found[role] = {"replicas": layout.pop("dp")} | _layout(layout)
    elif role in POLICY:
        again = {"gradient_checkpointing": True} if degrees.again else {}
        found["training"] = (
            {"precision": "bfloat16", "micro_batch_tokens": _longest_row(work)} | again | _layout(layout)
        )
    elif role != "generation":
        found[role] = _layout(layout)
    return found


def sampling_keys(size: ModelSize, tp: int, slots: int, work: StepWork) -> dict[str, Any]:
    """Returns the keys of `[generation]` that bound the memory of a replica: slots, and a cache for answers of the mean
    length, where they are not all alike and for vLLM, which else takes what it finds."""
    slots = max(1, slots)
    cache = cache_tokens(work.tokens + 1, slots) * size.cache_bytes
    if tp > 1:
        options = {"kv_cache_memory_bytes": -(-cache // tp)}
        return {"engine": "vllm", "layout_tp": tp, "slots": slots, "vllm": options}
    return {"slots": slots} | ({"cache_gb": round(cache / GB, 3)} if work.spread else {})


def _longest_row(work: StepWork) -> int:
    return work.prompt_tokens + work.longest_answer


def _size_of(role: str, job: PlannedJob) -> ModelSize:
    return job.sizes[role if role in job.sizes else "actor"]


def _layout(axes: dict[str, int]) -> dict[str, Any]:
    chosen = {axis: size for axis, size in axes.items() if size > 1}
    return {"layout": chosen} if chosen else {}


def runs(job: PlannedJob) -> "ExperimentLayouts":
    """Returns the layouts that an experiment has, by the rules of experiments."""
    return ExperimentLayouts(job)


class ExperimentLayouts(Layouts):
    """The layouts of a search that an experiment has, with the bytes that `asyncrl plan` counts. Holds what it has
    answered, by what decides the answer; a search asks."""

    def __init__(self, job: PlannedJob) -> None:
        self._job = job
        self._lone = {role for role in job.sizes if _is_lone(role, job)}
        self._runs: dict[tuple[Any, ...], bool] = {}
        prompt = job.work.prompt_tokens
        self._config = Config.model_validate(_experiment(job))
        self._lengths = RowLengths(prompt, prompt)
        self._taken = cache(self._bytes_of)
        self._sampled = cache(self._bytes_of_sampling)

    def runs(self, role: str, strategy: Strategy) -> bool:
        train = strategy.degrees
        samples = self._job.work.samples
        # More copies than two, or shards, are refused like two, unless there are more than samples.
        several = [min(ranks, 2) for ranks in (train.dp // train.ep, train.shard)]
        key = (
            role,
            train.pp,
            train.tp,
            train.ep,
            *several,
            train.data > samples,
            strategy.generate.pp,
            strategy.generate.tp,
        )
        if key not in self._runs:
            tables = role_tables(role, strategy, self._job)
            self._runs[key] = role in self._lone or not refusal(role, tables, self._job)
        return self._runs[key]

    def budgets(self, sizes: Mapping[str, ModelSize], work: StepWork, whole: float) -> Iterator[list[float]]:
        """Yields the bytes of roles where frozen ones have whole copies, which answer fastest, and those in shares."""
        frozen = {role: self.taken(role, sizes[role], Degrees(), work) for role in sizes if role in FROZEN}
        others = {role: size for role, size in sizes.items() if role not in frozen}
        if frozen and (left := whole - sum(frozen.values())) > 0:
            shares = dict(zip(others, *super().budgets(others, work, left), strict=True))
            yield [float({**frozen, **shares}[role]) for role in sizes]
        yield from (list(each) for each in super().budgets(sizes, work, whole))

    def variants(self, role: str, degrees: Degrees) -> Iterator[list[Degrees]]:
        """Yields copies whose weights more and more ranks share out; of what is trained also with layers that are
        computed again."""
        shards = [each for each in powers(degrees.dp) if degrees.dp % each == 0 and (each == 1 or degrees.ep == 1)]
        for again in (False, True) if role in TRAINED else (False,):
            yield [replace(degrees, dp=degrees.dp // each, shard=each, again=again) for each in shards]

    def taken(self, role: str, size: ModelSize, degrees: Degrees, work: StepWork) -> float:
        return self._taken(role, size, degrees)

    def kept(self, role: str, size: ModelSize, degrees: Degrees, work: StepWork) -> float:
        return self._taken(role, size, degrees)  # Workers of their own sample while it trains.

    def _bytes_of(self, role: str, size: ModelSize, degrees: Degrees) -> int:
        shape = size.of_plans
        axes = Degrees() if role in self._lone else degrees
        ranks = {"tp": axes.tp, "dp": axes.dp // axes.ep, "shard": axes.shard}
        if role not in TRAINED:
            return frozen_need(role, shape, LayoutConfig(**ranks), 1, GPU).of_device(axes.gpus)
        training = self._config.training.model_copy(update={"gradient_checkpointing": degrees.again})
        config = self._config.model_copy(update={"training": training})
        layout = TrainingLayoutConfig(**ranks, pp=axes.pp, ep=axes.ep)
        name = "training" if role in POLICY else role
        return TrainedModel(name, config, shape, self._lengths, GPU, layout).need().of_device(axes.gpus)

    def sampling(self, size: ModelSize, generate: Degrees, work: StepWork, free: float, most: int) -> tuple[int, float]:
        count = partial(self._sampled, size, generate.tp)
        first = count(1)
        last = count(most)
        room = most if last <= free else int((free - first) // max(1.0, (last - first) / max(1, most - 1))) + 1
        while room > 0 and count(room) > free:  # Caches have whole blocks.
            room -= 1
        return (room, count(room)) if room > 0 else (0, 0)

    def _bytes_of_sampling(self, size: ModelSize, tp: int, slots: int) -> int:
        keys = sampling_keys(size, tp, slots, self._job.work)
        generation = self._config.generation.model_copy(update={"device": "cuda", **keys})
        config = self._config.model_copy(update={"generation": generation})
        return generation_need(config, size.of_plans, self._lengths, "generation", 1).of_device(1) // tp


def _experiment(job: PlannedJob) -> dict[str, dict[str, Any]]:
    """Returns the tables of an experiment with the work of a job, in which each role has a service."""
    work = job.work
    found = {name: dict(values) for name, values in ALL_ROLES.items()}
    found["task"] = {"prompts": "p", "prompts_per_step": max(1, work.samples // work.samples_per_prompt)}
    found["task"] |= {"samples_per_prompt": work.samples_per_prompt, "max_prompt_tokens": work.prompt_tokens}
    found["generation"] = {"max_new_tokens": work.longest_answer}
    found["training"] = {"precision": "bfloat16", "micro_batch_tokens": _longest_row(work)}
    return found


def refusal(role: str, tables: Tables, job: PlannedJob) -> str:
    """Returns why an experiment would be refused for the tables of a role; "" if it has such a layout."""
    given = _experiment(job)
    for name, values in tables.items():
        given[name] = given.get(name, {}) | values
    if _is_spread(job):
        joined = {name: _workers(values) for name, values in tables.items()}
        given["fleet"] = {"wire": "tcp", "listen": "tcp://127.0.0.1:7000", "joined": joined}
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        return "; ".join(each["msg"] for each in error.errors())
    ranks = layouts(config)
    refused = (
        text for name in tables if name in ranks for text in layout_refusals(_size_of(role, job).config, ranks[name])
    )
    return "; ".join(refused)


def _workers(values: Mapping[str, Any]) -> int:
    """Returns the workers of a service with these values."""
    sizes: Mapping[str, int] = values.get("layout", {})
    return int(values.get("replicas", 1)) * prod(sizes.values())


def _is_lone(role: str, job: PlannedJob) -> bool:
    """Returns whether the service of a role has one rank, whatever is found: critics that join."""
    return role in ("critic", "cost_critic") and _is_spread(job)


def _is_spread(job: PlannedJob) -> bool:
    """Returns whether workers are on several hosts, and so join."""
    return sum(len(group.hosts) for group in job.groups) > 1


def pool_name(placed: PlacedSet) -> str:
    return "_".join(placed.roles)


def _pool(placed: PlacedSet, hosts: dict[str, tuple[int, ...]], *, one_host: bool) -> Iterator[str]:
    numbers = next(iter(hosts.values()))
    yield f"[pools.{pool_name(placed)}]  # {placed.group.name}"
    yield f"devices = {value_text([f'cuda:{number}' for number in numbers])}"
    yield f"memory_gb = {placed.group.gpu.memory / GB:g}"
    if not one_host:
        yield f"hosts = {value_text(list(hosts))}"
