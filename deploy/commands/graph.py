"""`asyncrl graph` prints the algorithm of an experiment, and its services with endpoints, protocols and sockets."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.deploy.commands.command_parser import asks_for_usage

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.fleet.fleet import ServiceSpec

USAGE = f"""\
usage: asyncrl graph NAME|FILE [--section.key value ...]

{__doc__}
A `*` marks each key of the algorithm whose value is not that of its preset. Nothing is started."""

INSIDE = "the ranks of the trainer sample between two steps, with weights that they gather from each other"
"""The way of new weights with `generation.colocate`."""

OFF = (0, "none")
"""Values of parts that are off."""
LEADING = ("advantage", "old_logprobs", "correction")
"""Keys on which defaults of other keys depend, each also on those before it."""


def main(arguments: list[str]) -> int:
    if asks_for_usage("graph", USAGE, arguments):
        return 0
    from asyncrl.algorithms.algorithm_by_name import algorithm_problems
    from asyncrl.config.problems import refuse
    from asyncrl.config.sources import load

    config = load(arguments[0], arguments[1:]).config
    refuse(algorithm_problems(config))
    print("\n".join(graph(config)))
    return 0


def graph(config: "Config") -> Iterator[str]:
    """Yields the lines to print."""
    from asyncrl.deploy.service_specs import service_specs, worker_count

    specs = service_specs(config)
    workers = worker_count(config)
    processes = "in one process" if config.fleet.wire == "inproc" else "one process each"
    yield f"{config.name}: {config.algorithm.preset} on {len(specs)} services, {workers} workers, {processes}"
    yield from _algorithm_lines(config)
    for spec in specs:
        yield from ("", *_service_lines(spec, config))
    rows = "shared memory, one slot a row" if config.fleet.wire == "ipc" else "frames over the owner's data socket"
    staleness = config.staleness
    bound = f"no token older than {staleness.limit} versions" if staleness.rule.bounded else "no bound"
    yield ""
    yield f"rows       {rows}; the controller passes references"
    yield from _weight_lines(config)
    yield from _adapter_lines(config)
    yield f"gate       {staleness.policy}: {bound}"


def _weight_lines(config: "Config") -> Iterator[str]:
    """Yields how new weights reach generation, or evaluation alone where the ranks of the trainer sample."""
    from asyncrl.fleet.weight_transport import transport_of

    chosen = transport_of(config)
    colocate = config.generation.colocate
    if colocate == "none":
        yield f"weights    {chosen.facts.way}; it flips between two decode steps"
    else:
        yield f"weights    {INSIDE}"
    if not config.publishes_weights:
        yield "transport  none: nothing is published"
        return
    if colocate != "none":
        yield f"evaluation {chosen.facts.way.replace('generation', 'evaluation')}"
    coded = f"; codec {config.weights.codec}" if chosen.facts.encodes else ""
    yield f"transport  {chosen.name}: {chosen.reason}{coded}"


def _adapter_lines(config: "Config") -> Iterator[str]:
    """Yields what adapters change about a run with `model.lora`."""
    if (lora := config.model.lora) is None:
        return
    layers = ", ".join(lora.targets)
    yield (
        f"adapters   rank {lora.rank}, alpha {lora.alpha:g}, on {layers}: versions hold nothing else, and each "
        "generation worker keeps the base model"
    )
    if config.algorithm.kl > 0 and not config.reference_by_service:
        yield "reference  the trainer computes its log-probs with the base model, before each step"


def _algorithm_lines(config: "Config") -> Iterator[str]:
    """Yields the algorithm and the values of its keys; `*` marks values that the config overrides."""
    from asyncrl.algorithms.algorithm_by_name import algorithm_of
    from asyncrl.config.sections.algorithm_config import PRESETS, expanded
    from asyncrl.config.toml_writer import value_text

    chosen = config.algorithm
    preset = PRESETS[chosen.preset]
    yield f"algorithm  {chosen.custom or algorithm_of(config).roll_out.__module__}"
    yield f"paper      {preset.paper}"
    for key, expected in preset.parts.items():
        value = getattr(chosen, key)
        yield f"    {key} = {value_text(value)}" + ("" if value == expected else f"  * not {value_text(expected)}")
    hidden = {*preset.parts, "preset", "custom", *chosen.unread_keys}
    for key, field in type(chosen).model_fields.items():
        value = getattr(chosen, key)
        is_off = value in OFF and value == field.default
        # Recomputed log-probs have a correction by default, so having none is a choice.
        if key in hidden or value is None or (is_off and (key, chosen.old_logprobs) != ("correction", "recomputed")):
            continue
        before = LEADING[: LEADING.index(key)] if key in LEADING else LEADING
        expected = expanded({each: getattr(chosen, each) for each in before}, chosen.preset).get(key, field.default)
        yield f"    {key} = {value_text(value)}" + ("" if value == expected else "  *")


def _service_lines(spec: "ServiceSpec", config: "Config") -> Iterator[str]:
    layout = spec.layout
    more = [f"{axis} {size}" for axis in ("shard", "sp", "ep") if (size := getattr(layout, axis)) > 1]
    shared_out = config.generation.layout if spec.inside else layout
    shape = " x ".join([f"pp {shared_out.pp}", f"tp {shared_out.tp}", f"dp {layout.dp}", *more])
    yield f"{spec.name}  ({spec.contract.__name__}: {spec.replicas} x [{shape}], {spec.implementation})"
    for endpoint in sorted(spec.contract.endpoints.values(), key=lambda each: (each.lane.value, each.name)):
        repeat = f"idempotent: {endpoint.idempotent.value}" + ("  stream" if endpoint.stream else "")
        yield f"    {endpoint.name:<16}{endpoint.transfer.name:<24}{endpoint.lane.value:<9}{repeat}"
    for worker in (f"{spec.name}{replica}.{rank}" for replica in range(spec.replicas) for rank in range(layout.size)):
        sockets = {
            "ipc": f"ipc://<sockets>/{worker}-<incarnation>-<id>.{{control,work,data}}",
            "tcp": f"tcp://{_host_of(spec, config)}:<port> x 3 for {worker} (CURVE)",
            "inproc": f"inproc://{worker}-<incarnation>-<id>.{{control,work,data}}",
        }
        yield f"    ROUTER {sockets[config.fleet.wire]}"


def _host_of(spec: "ServiceSpec", config: "Config") -> str:
    """Returns where a worker listens when the wire is tcp."""
    if spec.name in config.fleet.joined:
        return "<host that joins>"
    return config.fleet.listen.removeprefix("tcp://").rpartition(":")[0] or "127.0.0.1"
