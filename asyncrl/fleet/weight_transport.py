"""The transport of weights of a run, from its config, without torch."""

from dataclasses import replace

from asyncrl.config.model_and_weights_rules import numbered
from asyncrl.config.schema import Config
from asyncrl.lanes.host_id import HostId
from asyncrl.lanes.weights.selection.transport_choice import TransportChoice, WorkerPlace, choose_transport

ANY_HOST = HostId("any host that joins")


def transport_of(config: Config) -> TransportChoice:
    """Chooses the transport of a run. Workers that do not join run on the host of the controller; those that join may
    be on any host, and on others than their predecessors."""
    trainer, generator = (
        WorkerPlace.here(numbered(device)) for device in (config.training.device, config.generation.device)
    )
    if not {"training", "generation", "evaluation"}.isdisjoint(config.fleet.joined):
        generator = replace(generator, host=ANY_HOST)
    return choose_transport(config.weights.transport, trainer, generator, in_process=config.fleet.wire == "inproc")
