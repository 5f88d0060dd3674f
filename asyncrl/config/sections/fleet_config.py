"""The section `[fleet]` of a config."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.algorithm_config import Positive, PositiveFloat, Section
from asyncrl.config.sections.secret import SecretPath


class FleetConfig(Section):
    """Processes, their connections and deadlines."""

    wire: Literal["ipc", "tcp", "inproc"] = "ipc"
    """Connection of the workers: ipc is a process for each and rows in shared memory; tcp sends rows as frames, over
    loopback or where `listen` is; inproc is everything in one process, for tests."""
    listen: str = ""
    """Address tcp://HOST:PORT at which workers of other hosts join, HOST being this one as they reach it. Empty: all
    workers start here."""
    joined: dict[str, Positive] = Field(default={})
    """Services whose workers join, with the number that has to be there before the run begins: {generation = 2}. More
    may join up to the replicas of the service."""
    join_deadline: PositiveFloat = 300.0
    """Seconds without progress that the run waits for workers of fleet.joined, at its start and when a service has lost
    all of its own."""
    join_keys: SecretPath = ""
    """Folder with the keys that may join (`asyncrl admit`). Empty: `join_keys` in the run directory, made where the run
    listens on loopback."""
    ray_resources: dict[str, dict[str, PositiveFloat]] = Field(default={})
    """Resources that a worker of a service asks of Ray with `asyncrl run NAME --on ray`: {generation = {CPU = 4, GPU =
    1, rented = 1}}. Default: one CPU, and one GPU where the service's device is cuda."""
    call_deadline: PositiveFloat = 600.0
    """Seconds without answer or progress of a worker after which its calls are given up and it is started again. Calls
    that wait for their turn at a worker that makes progress are not late."""
    grace: PositiveFloat = 20.0
    """Seconds from the signal that ends a run until its last checkpoint is begun. A step that does not end within a
    third of them is undone. Writing the checkpoint and up to ten seconds to stop workers come on top: leave room for
    both in Slurm, Docker or Kubernetes."""
    start_deadline: PositiveFloat = 120.0
    """Seconds in which a worker has to start and load its model."""
    watchdog: PositiveFloat = 120.0
    """Seconds without progress after which the state of the fleet is printed. A worker that answers nothing about its
    health for as long (at least 5 s) is killed and replaced; trainer and critics as `trainer_restarts` says."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Number of times that the command restarts itself after trainer or controller died."""
    trainer_restarts: Annotated[int, Field(ge=0)] = 3
    """Number of times that trainer and critics start again from one checkpoint, while the other workers stay, after one
    of them died. The next death without a newer checkpoint ends the run with exit status 75. Always 0 where the trainer
    or a critic joins, or generation is in the processes of the trainer."""
    threads: Positive = 1
    """Number of torch threads of each worker."""
    start: Literal["fork", "spawn"] = "fork"
    """Start of worker processes. `fork` copies them from a process that has imported torch and transformers, within a
    tenth of a second and with shared memory. `spawn` imports everything anew; workers that cannot be forked are spawned
    anyway."""
