"""The transport of weights of a run, from its config, without torch."""

from asyncrl.config.schema import Config
from asyncrl.config.weights_rules import numbered
from asyncrl.lanes.weights.selection.transport_choice import TransportChoice, WorkerPlace, choose_transport


def transport_of(config: Config) -> TransportChoice:
    """Chooses the transport of a run: today's launchers start all workers on the host of their controller."""
    trainer, generator = (
        WorkerPlace.here(numbered(device)) for device in (config.training.device, config.generation.device)
    )
    return choose_transport(config.weights.transport, trainer, generator, in_process=config.fleet.wire == "inproc")
