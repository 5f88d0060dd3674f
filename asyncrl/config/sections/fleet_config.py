"""The section `[fleet]` of a config."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.algorithm_config import Positive, PositiveFloat, Section
from asyncrl.config.sections.secret import SecretPath


class FleetConfig(Section):
    """Processes, their connections and deadlines."""

    wire: Literal["ipc", "tcp", "inproc"] = "ipc"
    """Connection of the workers: with rows in shared memory (ipc), as frames over loopback or where `listen` is (tcp),
    or everything in one process, for tests (inproc)."""
    listen: str = ""
    """Address tcp://HOST:PORT at which workers of other hosts join, HOST being this one as they reach it. Empty: all
    workers start here."""
    joined: dict[str, Positive] = Field(default={})
    """Services whose workers join, with the number that the run waits for: {generation = 2}. More may join up to the
    replicas of the service."""
    join_deadline: PositiveFloat = 300.0
    """Seconds without progress that the run waits for workers of fleet.joined, also when a service has lost all of its
    own."""
    join_keys: SecretPath = ""
    """Folder with the keys that may join (`asyncrl admit`). Empty, on loopback: `join_keys` in the run directory."""
    ray_resources: dict[str, dict[str, PositiveFloat]] = Field(default={})
    """Resources of a worker on Ray: {generation = {CPU = 4, GPU = 1, rented = 1}}. Default: one CPU, and one GPU where
    the service's device is cuda."""
    call_deadline: PositiveFloat = 600.0
    """Seconds without answer or progress of a worker after which its calls are given up and it is started again."""
    grace: PositiveFloat = 20.0
    """Seconds from the signal that ends a run until its last checkpoint is begun; a step that takes over a third of
    them is undone. Writing it, and ten seconds to stop workers, come on top."""
    start_deadline: PositiveFloat = 120.0
    """Seconds in which a worker has to start and load its model."""
    watchdog: PositiveFloat = 120.0
    """Seconds without progress after which the state of the fleet is printed. A worker that does not answer for as long
    (at least 5 s) is killed and replaced; trainer and critics as `trainer_restarts` says."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts of the command by itself after trainer or controller died."""
    trainer_restarts: Annotated[int, Field(ge=0)] = 3
    """Returns of trainer and critics to one checkpoint after one of them died; the next death ends the run with exit
    status 75. Always 0 where the trainer or a critic joins, or generation is in the processes of the trainer."""
    threads: Positive = 1
    """Number of torch threads of each worker."""
    start: Literal["fork", "spawn"] = "fork"
    """Start of worker processes: copies of one that has imported torch (fork), or new ones (spawn), as for all that
    cannot be forked."""
