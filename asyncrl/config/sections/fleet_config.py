"""The section `[fleet]` of a config."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.algorithm_config import Positive, PositiveFloat, Section
from asyncrl.config.sections.secret import SecretPath


class FleetConfig(Section):
    """Processes, their connections and deadlines."""

    wire: Literal["ipc", "tcp", "inproc"] = "ipc"
    """Connection of the workers. ipc: one process for each worker, rows in shared memory. tcp: rows as frames, over
    loopback or where `listen` is. inproc: everything in one process, for tests."""
    listen: str = ""
    """Address at which workers on other hosts join, tcp://HOST:PORT with a HOST by which they reach this one. Empty:
    all workers are started here."""
    joined: dict[str, Positive] = Field(default={})
    """Services whose workers join, each with the number that has to be there before the run begins, such as
    {generation = 2}. More may join at any time, up to the replicas of the service."""
    join_deadline: PositiveFloat = 300.0
    """Seconds that the run waits at its start for the workers of fleet.joined, and later for one worker to join when a
    service has lost all of its own; from the last sign of progress, such as a file that a host copies."""
    join_keys: SecretPath = ""
    """Folder with the keys that may join (`asyncrl admit`). Empty: `join_keys` in the run directory, which the run
    makes when it listens on the loopback interface."""
    ray_resources: dict[str, dict[str, PositiveFloat]] = Field(default={})
    """Resources that a worker of a service asks of a Ray cluster, with `asyncrl run NAME --on ray`; for instance
    {generation = {CPU = 4, GPU = 1, rented = 1}}, with names of the cluster. Default: one CPU, and one GPU where the
    service's device is cuda."""
    call_deadline: PositiveFloat = 600.0
    """Seconds without any answer or progress of a worker after which its calls are given up and it is started again.
    Calls that wait for their turn at a worker that makes progress are not late."""
    grace: PositiveFloat = 20.0
    """Seconds from the signal that ends a run until its last checkpoint is begun at the latest. A step that does not
    end within a third of them is undone, and its samples wait for the next start. Writing the checkpoint comes on top,
    and stopping the workers with up to ten seconds: leave room for both in what Slurm, Docker or Kubernetes give."""
    start_deadline: PositiveFloat = 120.0
    """Seconds that a worker may take to start and load its model."""
    watchdog: PositiveFloat = 120.0
    """Seconds without progress after which the state of the whole fleet is printed. A worker that does not even answer
    about its health for as long (at least 5 s) is killed, as one that dies: trainer and critics go on as
    `trainer_restarts` says, the others start again."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Number of times that the command restarts itself after the trainer or the controller died."""
    trainer_restarts: Annotated[int, Field(ge=0)] = 3
    """Number of times that trainer and critics start again from one checkpoint, while the other workers stay, after one
    of them died. The next death without a newer checkpoint ends the run with exit status 75; living ranks of the
    trainer with copies of all its weights make one. Always 0 where the trainer or a critic joins, or generation is in
    the processes of the trainer."""
    threads: Positive = 1
    """Number of torch threads of each worker."""
    start: Literal["fork", "spawn"] = "fork"
    """Start of worker processes. `fork` copies them from one process that has imported torch and transformers, so that
    they start in a tenth of a second and share the memory of the imports. With `spawn` each worker imports everything
    itself; so do workers whose engine cannot be forked, and all workers where a fork is not safe."""
