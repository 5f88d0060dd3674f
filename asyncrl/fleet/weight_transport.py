"""The transport of weights of a run, from its placement, without torch."""

from dataclasses import dataclass

from asyncrl.config.placement import Placement
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.protocols.weight_transports import TRANSPORTS, Transport


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """Names a transport (a value of `weights.transport` but "auto", or "inproc"), and says why it was chosen."""

    name: str
    reason: str

    @property
    def facts(self) -> Transport:
        return TRANSPORTS[self.name]


def choose_transport(
    named: str, devices: tuple[str, str], *, same_host: bool, in_process: bool = False
) -> TransportChoice:
    """Chooses from `weights.transport` and the places of both ends. devices: of the models of trainer and generation.
    in_process: whether all workers are one process.

    Raises ConfigError for memory that is shared between hosts.
    """
    if TRANSPORTS[named].same_host and not same_host:
        raise ConfigError(f'weights.transport = "{named}": trainer and generation are on different hosts; write "auto"')
    if in_process and named in ("auto", "shm"):
        return TransportChoice("inproc", "all workers are one process")
    if named != "auto":
        return TransportChoice(named, "as weights.transport says")
    if not same_host:
        return TransportChoice("tcp", "trainer and generation are on different hosts")
    return TransportChoice("shm", f"trainer and generation are on one host{_on_devices(*devices)}")


def _on_devices(trainer: str, generator: str) -> str:
    """Says what the devices mean for shared memory. The ways between devices ran little or never (docs/gpu.md),
    so they are named here and not chosen."""
    if (trainer, generator) == ("cpu", "cpu"):
        return ""
    if not (trainer.startswith("cuda") and generator.startswith("cuda")):
        return "; devices copy from and to it"
    direct = "cuda_ipc" if trainer == generator else "nccl"
    return f'; devices copy from and to it, which "{direct}" would spare: name it in weights.transport'


def transport_of(config: Config) -> TransportChoice:
    """Chooses the transport of a run. Workers that join are of hosts of their own: those of one host may be in two
    containers, and a later one may come from elsewhere."""
    placement = Placement.of(config)
    trainer = placement.trainer
    apart = next((each for each in placement.readers if not each.may_share_memory(trainer)), None)
    reader = apart or (*placement.readers, trainer)[0]
    devices = (trainer.devices[0], reader.devices[0])
    same_host = apart is None or not (apart.joins or trainer.joins)
    in_process = config.fleet.wire == "inproc"
    return choose_transport(config.weights.transport, devices, same_host=same_host, in_process=in_process)
