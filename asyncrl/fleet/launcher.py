"""The interface between the supervisor and what starts workers: processes, or tasks of this process."""

from typing import Protocol

from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec


class WorkerProcess(Protocol):
    """A started worker. pid: of its process; of this process when the worker is a task inside it."""

    pid: int

    async def wait(self) -> str:
        """Returns how the worker ended ("killed by SIGKILL") once it is dead. May be awaited repeatedly."""
        ...

    def stop(self) -> None:
        """Asks the worker to finish."""
        ...

    def terminate(self) -> None:
        """Ends a worker that does not react to `stop`."""
        ...

    def kill(self) -> None:
        """Ends the worker at once, without a chance to clean up."""
        ...


class Launcher(Protocol):
    """Starts workers: as processes (deploy/process/local_launcher.py) or inside this one (inproc_launcher.py)."""

    def addresses(self, instance: str) -> Addresses:
        """Returns the addresses that an instance of this name listens on."""
        ...

    async def spawn(self, spec: WorkerSpec) -> WorkerProcess:
        """Starts a worker. When it is cancelled, nothing is left running."""
        ...

    def clean_up(self, spec: WorkerSpec) -> None:
        """Removes what a dead instance left: shared memory and socket files."""
        ...
