"""The job that `map`, `whatif` and `advise` read: models, work of a step, and devices, from one TOML file."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from asyncrl.errors import ConfigError
from asyncrl.simulation.planning.gpus import Gpu, gpu_named, known_gpus
from asyncrl.simulation.planning.model_size import ModelSize, model_size

Count: TypeAlias = Annotated[int, Field(gt=0)]
TAIL = 8
"""Multiple of the mean at which answers are cut when the job does not say."""
ROLES = ("generation", "training", "critic", "reference", "reward", "cost", "cost_critic")
"""Services of a job that take GPUs; `actor` is generation and training on the same ones."""


class JobTable(BaseModel):
    """Base of the tables of a job file, which refuse unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StepWork(JobTable):
    """The work of a training step. Lengths of answers are lognormal with mean `response_tokens` and standard deviation
    `spread` of the logarithm, cut at `longest`; spread 0: all have the mean."""

    prompt_tokens: Count = 1024
    response_tokens: Count = 1024
    spread: Annotated[float, Field(ge=0, le=3)] = 0.0
    longest: Annotated[int, Field(ge=0)] = 0
    samples: Count = 1024
    samples_per_prompt: Count = 8
    updates: Count = 1
    limit: Annotated[int, Field(ge=0)] = 1
    recompute: bool = False
    """The trainer computes log-probabilities of sampled tokens before it trains."""
    sequences: Annotated[int, Field(ge=0)] = 0
    """Most sequences that a replica decodes at one time; 0: as many as fit into its memory."""

    @property
    def tokens(self) -> int:
        """Returns the mean tokens of a sample."""
        return self.prompt_tokens + self.response_tokens

    @property
    def longest_answer(self) -> int:
        """Returns the tokens at which answers are cut, by default a multiple of the mean where lengths differ."""
        return self.longest or self.response_tokens * (TAIL if self.spread else 1)


class DeviceTable(JobTable):
    """GPUs of one kind. hosts: their names, or how many there are; gpus: of each host; 0: as many as usual. network:
    bytes a second of one GPU to other hosts; 0: as in the table of GPUs."""

    gpu: str
    hosts: Count | tuple[str, ...] = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    network: Annotated[float, Field(ge=0)] = 0.0


class FixedSplit(JobTable):
    """A layout to ask about instead of the best one. generation, training: GPUs of each; without, they share all."""

    generation: Count
    training: Count


class MeasuredStages(JobTable):
    """Stages of one step as somebody measured them: seconds of generation and of everything else that the trainer's
    GPUs do. split: GPUs of either; without, both used all in turn. limit: of that run."""

    generation_seconds: Annotated[float, Field(gt=0)]
    training_seconds: Annotated[float, Field(gt=0)]
    split: FixedSplit | None = None
    limit: Annotated[int, Field(ge=0)] = 0


class JobTables(JobTable):
    """A job file. objective: seconds of a synchronous iteration, or of a step whose services overlap."""

    objective: Literal["iteration", "asynchronous"] = "iteration"
    models: Mapping[str, str]
    work: StepWork = StepWork()
    devices: Annotated[tuple[DeviceTable, ...], Field(min_length=1)]
    layouts: Mapping[str, tuple[Count, Count]] = {}
    """Tensor and pipeline parallel degrees of roles that train or score, in place of the fastest ones."""
    split: FixedSplit | None = None
    measured: MeasuredStages | None = None
    reward_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds of a reward function for one sample, which runs on CPUs."""


class GpuGroup(JobTable):
    """GPUs of one kind with the hosts that have them."""

    name: str
    gpu: Gpu
    hosts: tuple[str, ...]
    each: int

    @property
    def count(self) -> int:
        return len(self.hosts) * self.each


class PlannedJob(JobTable):
    """A job file with its models and GPUs looked up. sizes: of the model of each role."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    tables: JobTables
    sizes: Mapping[str, ModelSize]
    groups: tuple[GpuGroup, ...]

    @property
    def work(self) -> StepWork:
        return self.tables.work

    @property
    def count(self) -> int:
        """Returns the number of all GPUs."""
        return sum(group.count for group in self.groups)


def read_job(path: Path, gpus: Mapping[str, Gpu] | None = None) -> PlannedJob:
    """Reads a job. Raises ConfigError, which says what is wrong with which key."""
    try:
        return planned(JobTables.model_validate(tomllib.loads(path.read_text())), gpus or known_gpus())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the job file {path} cannot be read: {error}") from error
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"{path}: " + "; ".join(lines)) from error


def planned(tables: JobTables, gpus: Mapping[str, Gpu]) -> PlannedJob:
    """Looks up models and GPUs. Raises ConfigError for unknown ones."""
    unknown = sorted(set(tables.models) - {"actor", *ROLES})
    if unknown:
        raise ConfigError(f"models: {', '.join(unknown)} is no role; roles are actor, {', '.join(ROLES)}")
    if ("actor" in tables.models) == ({"generation", "training"} <= set(tables.models)):
        raise ConfigError("models: name an actor, or generation and training")
    sizes = {role: model_size(model) for role, model in tables.models.items()}
    return PlannedJob(tables=tables, sizes=sizes, groups=tuple(_groups(tables, gpus)))


def _groups(tables: JobTables, gpus: Mapping[str, Gpu]) -> list[GpuGroup]:
    found: list[GpuGroup] = []
    for number, table in enumerate(tables.devices):
        gpu = gpu_named(table.gpu, gpus)
        each = table.gpus or gpu.gpus_per_host
        if each & (each - 1):
            raise ConfigError(f"devices: {each} GPUs a host are no power of two, so that groups do not fill hosts")
        changed = {"gpus_per_host": each} | ({"network": table.network} if table.network else {})
        known = (
            tuple(f"host{number}-{index}" for index in range(table.hosts))
            if isinstance(table.hosts, int)
            else table.hosts
        )
        found.append(GpuGroup(name=table.gpu, gpu=gpu.model_copy(update=changed), hosts=known, each=each))
    names = [host for group in found for host in group.hosts]
    if len(set(names)) < len(names):
        raise ConfigError("devices: a host is named twice")
    return found
