"""The transport of weights of a run, from its config, without torch."""

from asyncrl.config.schema import Config
from asyncrl.lanes.weights.transports.choice import TransportChoice, WorkerPlace, choose_transport


def transport_of(config: Config) -> TransportChoice:
    """Chooses the transport of a run: today's launchers start all workers on the host of their controller."""
    trainer, generator = WorkerPlace.here(config.training.device), WorkerPlace.here(config.generation.device)
    return choose_transport(config.weights.transport, trainer, generator, in_process=config.fleet.wire == "inproc")
