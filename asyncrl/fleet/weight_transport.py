"""The transport of weights of a run, from its placement, without torch."""

from dataclasses import dataclass

from asyncrl.config.placement import PlacedWorker, Placement
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.weight_transports import TRANSPORTS, Transport

# The choice of a transport of weights from where its two ends are.


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Says where an end is. device: of its model."""

    host: HostId
    device: str

    @classmethod
    def here(cls, device: str) -> "WorkerPlace":
        """Returns the place of this process."""
        return cls(HostId.here(), device)


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """Names a transport (a value of `weights.transport` but "auto", or "inproc"), and says why it was chosen."""

    name: str
    reason: str

    @property
    def facts(self) -> Transport:
        return TRANSPORTS[self.name]


def choose_transport(
    named: str, trainer: WorkerPlace, generator: WorkerPlace, *, in_process: bool = False
) -> TransportChoice:
    """Chooses from `weights.transport` and the places of both ends. in_process: whether all workers are one process.

    Raises ConfigError for memory that is shared between hosts.
    """
    same_host = trainer.host == generator.host
    if TRANSPORTS[named].same_host and not same_host:
        raise ConfigError(f'weights.transport = "{named}": trainer and generation are on different hosts; write "auto"')
    if in_process and named in ("auto", "shm"):
        return TransportChoice("inproc", "all workers are one process")
    if named != "auto":
        return TransportChoice(named, "as weights.transport says")
    if not same_host:
        return TransportChoice("tcp", "trainer and generation are on different hosts")
    return TransportChoice("shm", f"trainer and generation are on one host{_on_devices(trainer, generator)}")


def _on_devices(trainer: WorkerPlace, generator: WorkerPlace) -> str:
    """Says what the devices mean for shared memory. The ways between devices ran little or never (docs/gpu.md),
    so they are named here and not chosen."""
    devices = (trainer.device, generator.device)
    if devices == ("cpu", "cpu"):
        return ""
    if not all(device.startswith("cuda") for device in devices):
        return "; devices copy from and to it"
    direct = "cuda_ipc" if trainer.device == generator.device else "nccl"
    return f'; devices copy from and to it, which "{direct}" would spare: name it in weights.transport'


def transport_of(config: Config) -> TransportChoice:
    """Chooses the transport of a run. Workers that join are of hosts of their own: those of one host may be in two
    containers, and a later one may come from elsewhere."""
    placement = Placement.of(config)
    trainer = placement.trainer
    readers = placement.readers
    farthest = next((each for each in readers if not each.may_share_memory(trainer)), (*readers, trainer)[0])
    return choose_transport(
        config.weights.transport, _end(trainer), _end(farthest), in_process=config.fleet.wire == "inproc"
    )


def _end(worker: PlacedWorker) -> WorkerPlace:
    if not worker.joins:
        return WorkerPlace.here(worker.devices[0])
    return WorkerPlace(HostId(worker.host, worker.name, worker.host), worker.devices[0])
