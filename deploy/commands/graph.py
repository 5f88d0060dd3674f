"""asyncrl graph: print the services of an experiment with their endpoints, transfer protocols and sockets."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.schema import AlgorithmConfig, Config
    from asyncrl.fleet.fleet import ServiceSpec
    from asyncrl.protocols.contracts import EndpointSpec

USAGE = "usage: asyncrl graph NAME|FILE [--section.key value ...]"


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(f"{USAGE}\n\n{__doc__}")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    from asyncrl.algorithms.select import algorithm_problems
    from asyncrl.config.problems import refuse
    from asyncrl.config.sources import load

    config = load(arguments[0], arguments[1:]).config
    refuse(algorithm_problems(config))
    print("\n".join(graph(config)))
    return 0


def graph(config: "Config") -> Iterator[str]:
    """Yields the lines to print."""
    from asyncrl.deploy.service_specs import service_specs

    specs = service_specs(config, evaluation=bool(config.evaluate.prompts))
    workers = sum(spec.replicas * spec.layout.size for spec in specs)
    processes = "one process" if config.fleet.wire == "inproc" else f"{workers + 1} processes"
    yield f"{config.name}: {config.algorithm.preset} on {len(specs)} services, {workers} workers, {processes}"
    yield from _algorithm_lines(config)
    for spec in specs:
        yield ""
        yield from _service_lines(spec, config)
    yield ""
    yield from _lane_lines(config)


def _algorithm_lines(config: "Config") -> Iterator[str]:
    """Yields the algorithm and the values of its preset, key by key; `*` marks values that the config overrides."""
    from asyncrl.algorithms.select import algorithm_of
    from asyncrl.config.presets import PRESETS, expanded
    from asyncrl.config.toml_writer import value_text

    preset, chosen = PRESETS[config.algorithm.preset], config.algorithm
    yield f"algorithm      {chosen.custom or algorithm_of(config).roll_out.__module__}"
    yield f"paper     {preset.paper}"
    for key, stands_for in preset.parts.items():
        value = getattr(chosen, key)
        own = "" if value == stands_for else f"  * not {value_text(stands_for)}"
        yield f"    {key} = {value_text(value)}{own}"
    leading = {key: getattr(chosen, key) for key in LEADING}
    for key, value in _other_keys(chosen).items():
        before = LEADING[: LEADING.index(key)] if key in LEADING else LEADING
        expected = expanded({each: leading[each] for each in before}, chosen.preset)
        own = "" if value == expected.get(key, type(chosen).model_fields[key].default) else "  *"
        yield f"    {key} = {value_text(value)}{own}"


OFF = (0, "none")
"""Values of parts that are off."""
LEADING = ("advantage", "old_logprobs", "correction")
"""Keys on which defaults of other keys depend, each also on those before it."""


def _other_keys(chosen: "AlgorithmConfig") -> dict[str, Any]:
    """Returns the keys that are not parts of the preset, without those that are off or that nothing reads."""
    from asyncrl.config.presets import PRESETS
    from asyncrl.config.unread_keys import reads_bounds

    unread = {"preset", "custom", *PRESETS[chosen.preset].parts}
    if chosen.kl == 0:
        unread |= {"kl_in", "kl_estimator"}
    if not reads_bounds(chosen):
        unread |= {"clip_low", "clip_high"}
    if chosen.correction == "none":
        unread.add("correction_level")
    defaults = {name: known.default for name, known in type(chosen).model_fields.items()}
    there = chosen.model_dump(exclude_none=True).items()
    off = {key for key, value in there if value in OFF and value == defaults[key]}
    if chosen.old_logprobs == "recomputed":
        off.discard("correction")
    return {key: value for key, value in there if key not in unread | off}


def _service_lines(spec: "ServiceSpec", config: "Config") -> Iterator[str]:
    layout = spec.layout
    shape = f"pp {layout.pp} x tp {layout.tp} x dp {layout.dp}"
    yield f"{spec.name}  ({spec.contract.__name__}: {spec.replicas} x [{shape}], {spec.implementation})"
    endpoints = sorted(spec.contract.endpoints.values(), key=lambda endpoint: (endpoint.lane.value, endpoint.name))
    for endpoint in endpoints:
        yield f"    {_endpoint(endpoint)}"
    for replica in range(spec.replicas):
        for rank in range(layout.size):
            yield f"    {_sockets(f'{spec.name}{replica}.{rank}', config)}"


def _endpoint(endpoint: "EndpointSpec") -> str:
    stream = "  stream" if endpoint.stream else ""
    repeat = f"idempotent: {endpoint.idempotent.value}"
    return f"{endpoint.name:<16}{endpoint.transfer.name:<24}{endpoint.lane.value:<9}{repeat}{stream}"


def _sockets(worker: str, config: "Config") -> str:
    where = {
        "ipc": f"ipc://<sockets>/{worker}-<incarnation>-<id>.{{control,work,data}}",
        "tcp": f"tcp://127.0.0.1:<port> x 3 for {worker} (CURVE)",
        "inproc": f"inproc://{worker}-<incarnation>-<id>.{{control,work,data}}",
    }[config.fleet.wire]
    return f"ROUTER {where}"


def _lane_lines(config: "Config") -> Iterator[str]:
    rows = "shared memory, one slot a row" if config.fleet.wire == "ipc" else "frames over the owner's data socket"
    yield f"rows      {rows}; the controller passes references"
    yield "weights   two slots: the trainer writes version v+1 beside v, generation flips between two decode steps"
    limit, policy = config.staleness.limit, config.staleness.policy
    yield (
        f"gate      {policy}: no token older than {limit} versions"
        if policy != "admit"
        else "gate      admit: no bound"
    )
