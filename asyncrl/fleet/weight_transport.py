"""The transport of weights of a run, from its placement, without torch."""

from asyncrl.config.placement import PlacedWorker, Placement
from asyncrl.config.schema import Config
from asyncrl.lanes.host_id import HostId
from asyncrl.lanes.weights.selection.transport_choice import TransportChoice, WorkerPlace, choose_transport


def transport_of(config: Config) -> TransportChoice:
    """Chooses the transport of a run. Workers that join are of hosts of their own: those of one host may be in two
    containers, and a later one may come from elsewhere."""
    placement = Placement.of(config)
    trainer, readers = placement.trainer, placement.readers
    farthest = next((each for each in readers if not each.may_share_memory(trainer)), (*readers, trainer)[0])
    return choose_transport(
        config.weights.transport, _end(trainer), _end(farthest), in_process=config.fleet.wire == "inproc"
    )


def _end(worker: PlacedWorker) -> WorkerPlace:
    if not worker.joins:
        return WorkerPlace.here(worker.devices[0])
    return WorkerPlace(HostId(worker.host, worker.name, worker.host), worker.devices[0])
