"""The end of the weight lane that a worker has, from its config and addresses."""

from asyncrl.fleet.worker.rank_meeting import LOOPBACK
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.bound_socket import host_of, on_tcp
from asyncrl.lanes.weights.chunk_codec import WireCodec
from asyncrl.lanes.weights.transports.transport_ends import NETWORK, WeightNetwork


def weight_network(context: WorkerContext) -> WeightNetwork:
    """Returns what the worker's end of a network needs. It listens where the worker listens for readers of rows."""
    data = context.spec.addresses.data
    host = host_of(data) if data.startswith(NETWORK) else LOOPBACK
    codec = WireCodec[context.config.weights.codec.upper()]
    device = context.config.training.device if context.spec.service == "training" else context.config.generation.device
    return WeightNetwork(
        context.reader.wire,
        on_tcp(host, "*"),
        context.spec.hello,
        context.tasks,
        codec,
        context.facts.heartbeat,
        device,
    )
