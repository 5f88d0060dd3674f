"""The one placement of a run: the pools and layouts of its services, who of them may join, and which worker runs on
which host and devices. Refuses what does not fit.

config ──> pools, layouts, fleet.joined ──> Placement ──> memory checks, `plan`, transport of weights, places where
                                                          workers join, devices of specifications, Ray
hosts that joined ──> rank_hosts.py, by the same rule ──> ranks on the hosts that are there
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asyncrl.config.experiment import Experiment
from asyncrl.config.problems import Problem, wrong
from asyncrl.config.sections.device_pools import CPU, Assignment, Demand, Device, DevicePlace, DevicePool, assign
from asyncrl.config.sections.training_config import SHARDED, AnyLayout, DeepspeedConfig, GenerationLayoutConfig
from asyncrl.errors import ConfigError
from asyncrl.protocols.rank_layout import Layout, crossings

# Finds where services run: in which pools, and which of their workers join a run. Refuses what does not fit.


COMPUTING = ("training", "critic", "cost_critic", "generation", "reference", "reward", "cost")
"""Sections with a device, in the order in which they choose from a pool: who cannot be restarted chooses first."""

ONE_REPLICA = ("training", "critic", "cost_critic")
"""Services that may join without replicas: they write checkpoints into the run directory, which their host has to see.
"""

JOINING_ROLES = ("generation", "evaluation", "reward", "reference", "cost", "environment", *ONE_REPLICA)
"""Services whose workers join some run."""

DEEPSPEED = 'training.engine = "deepspeed"'


def joining_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what is wrong about workers that join."""
    fleet = config.fleet
    replicas = _replicas(config)
    for service in fleet.ray_resources.keys() - replicas.keys():
        text = f"no {service} workers may join; those of this experiment that may are {', '.join(sorted(replicas))}"
        yield wrong("fleet.ray_resources", text)
    if bool(fleet.listen) != bool(fleet.joined):
        missing, present = ("fleet.joined", "fleet.listen") if fleet.listen else ("fleet.listen", "fleet.joined")
        text = "fleet.listen is where workers join, and fleet.joined says which: write both or none"
        yield Problem(missing, "", text, (present,))
    for service, needed in fleet.joined.items():
        if service not in replicas:
            known = ", ".join(sorted(replicas))
            yield wrong("fleet.joined", f"no {service} workers may join; those of this experiment that may are {known}")
        elif needed > replicas[service]:
            text = f"{needed} {service} workers are to join, and there are {replicas[service]}"
            key = f"{'evaluate' if service == 'evaluation' else service}.replicas"
            if service in ONE_REPLICA:
                yield Problem("fleet.joined", "", f"{text}: write {service} = {replicas[service]}")
            else:
                yield Problem("fleet.joined", "", f"{text}: raise {key}", (key,))
        elif service == "training" and needed < replicas[service]:
            text = f"the {replicas[service]} ranks of the trainer join together: write training = {replicas[service]}"
            yield wrong("fleet.joined training.layout", text)
    if fleet.joined and fleet.wire != "tcp":
        text = 'workers that join reach the others over a network: write fleet.wire = "tcp"'
        yield wrong("fleet.wire fleet.joined", text)
    engine = config.generation.engine_facts
    if not {"training", "generation", "evaluation"}.isdisjoint(fleet.joined) and not engine.reads("tcp"):
        where = "from the shared memory of the trainer's host"
        text = f"{engine.title} takes new weights {where}: neither of the two can join yet"
        yield wrong("fleet.joined generation.engine", text)
    if "reward" in fleet.joined and config.feedback.asks:
        text = "the reward worker serves the page on which people rate, on the host of the controller: it cannot join"
        yield wrong("fleet.joined feedback.ask", text)


def layouts(config: Experiment) -> dict[str, AnyLayout]:
    """Returns the layouts of the services of the experiment that can have several ranks, by their names."""
    found: dict[str, AnyLayout] = {"training": config.training.layout}
    if config.algorithm.advantage == "gae":
        found["critic"] = config.critic.layout
    if config.algorithm.constraint == "lagrangian":
        found["cost_critic"] = config.cost_critic.layout
    if config.reference_by_service:
        found["reference"] = config.reference.layout
    return found | {name: section.layout for name, section in config.scorers.items()}


def rank_layout(chosen: AnyLayout, generation: GenerationLayoutConfig | None = None) -> Layout:
    """Returns the layout that a table of the config describes. generation: stages and slices with which ranks of the
    trainer sample."""
    pp, tp = (None, None) if generation is None else (generation.pp, generation.tp)
    return Layout(chosen.pp, chosen.tp, chosen.dp, pp, tp, chosen.shard, chosen.sp, chosen.ep)


def layout_problems(config: Experiment, batch: int) -> Iterator[Problem]:
    """Yields what is wrong about the ranks of services. batch: samples of a step."""
    for service, layout in layouts(config).items():
        key = f"{service}.layout"
        if min(layout.tp, layout.dp, layout.shard) > 1:
            text = "tp, dp and shard above one at the same time were never tried; write dp = 1 and a larger shard"
            yield Problem(key, "", text)
        if layout.data > batch and service in ONE_REPLICA:
            text = f"a step has {batch} samples, and some of {layout.data} ranks get none; write {batch} or fewer"
            yield Problem(key, "", text, ("task.prompts_per_step", "task.samples_per_prompt"))
        if layout.size > 1 and config.fleet.wire == "inproc":
            text = f'ranks of {service} are processes, and "inproc" has only one; write layout = {{}} or wire = "ipc"'
            yield Problem(key, "", text, ("fleet.wire",))
        yield from _trainer_problems(config) if service == "training" else _led_problems(config, service, layout)


def _led_problems(config: Experiment, service: str, layout: AnyLayout) -> Iterator[Problem]:
    """Yields what a service other than the trainer cannot have in its layout."""
    if layout.size > 1 and service in config.scorers and not config.scorers[service].model:
        text = f"the ranks share a model, and there is no {service}.model: write that, or layout = {{}}"
        yield wrong(f"{service}.layout {service}.model", text)
    if layout.size > 1 and service == "reward" and config.feedback.asks:
        text = "several ranks are not supported with people who rate: write layout = {}"
        yield wrong("reward.layout feedback.ask", text)
    if layout.size > 1 and service in config.fleet.joined:
        text = f"several ranks that join are not supported: leave {service} out of fleet.joined, or write layout = {{}}"
        yield wrong(f"{service}.layout fleet.joined", text)


def _trainer_problems(config: Experiment) -> Iterator[Problem]:
    layout = config.training.layout
    if layout.pp > 1 and (layout.shard > 1 or min(layout.tp, layout.dp) > 1):
        text = f"pp = {layout.pp} is supported alone, beside tp and beside dp: write shard = 1, and tp = 1 or dp = 1"
        yield wrong("training.layout", text)
    if layout.sp > 1 and max(layout.pp, layout.tp, layout.shard) > 1:
        text = f"sp = {layout.sp} is supported alone and beside dp: write pp = 1, tp = 1 and shard = 1"
        yield wrong("training.layout", text)
    if layout.sp > 1 and config.model.lora is not None:
        text = "sp was never tried with adapters; write sp = 1, and dp or shard for ranks"
        yield wrong("training.layout model.lora", text)
    if layout.ep > 1 and max(layout.pp, layout.tp, layout.sp, layout.shard) > 1:
        text = f"ep = {layout.ep} is not supported beside pp, tp, sp or shard: write these as 1, and dp for more ranks"
        yield wrong("training.layout", text)
    if layout.ep > 1 and config.model.lora is not None:
        text = "ep is not supported with adapters; write ep = 1, and dp or shard for ranks"
        yield wrong("training.layout model.lora", text)
    if layout.tp > 1 and config.model.lora is not None:
        text = "tp does not split layers with adapters yet; write tp = 1, and dp or shard for ranks"
        yield wrong("training.layout model.lora", text)
    yield from deepspeed_problems(config)


def deepspeed_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what DeepSpeed does not train, and a table that nothing reads."""
    training = config.training
    layout = config.training.layout
    if training.engine == "torch":
        if training.deepspeed != DeepspeedConfig():
            text = 'nothing reads it with training.engine = "torch": remove it, or write engine = "deepspeed"'
            yield wrong("training.deepspeed training.engine", text, is_warning=True)
        return
    axes = [axis for axis in ("pp", "tp", "sp", "ep", "shard") if getattr(layout, axis) > 1]
    dp = "write layout = { dp = N }, over whose ranks training.deepspeed.stage shares out"
    for key, is_wrong, text in (
        ("training.layout", bool(axes), f"{' and '.join(axes)} is not supported with {DEEPSPEED}: {dp}"),
        ("training.layout", layout.size == 1, f"one rank is not supported with {DEEPSPEED}: {dp}"),
        (
            "training.optimizer",
            training.optimizer not in SHARDED,
            f"{training.optimizer} is not supported with {DEEPSPEED}: write {' or '.join(SHARDED)}",
        ),
        ("model.lora", config.model.lora is not None, f"adapters are not supported with {DEEPSPEED}: remove it"),
        ("training.router_replay", training.router_replay, f"it is not supported with {DEEPSPEED}: remove it"),
        (
            "generation.colocate",
            config.generation.colocate != "none",
            f'it is not supported with {DEEPSPEED}: write colocate = "none"',
        ),
    ):
        if is_wrong:
            yield Problem(key, "", f'{text}, or engine = "torch"', ("training.engine",))


def colocation_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what keeps the ranks of the trainer from sampling between their steps."""
    generation = config.generation
    engine = generation.engine_facts
    training = config.training
    fleet = config.fleet
    yield from _group_problems(config)
    if generation.colocate == "none":
        return
    device = training.device
    spread = training.layout.size > 1 and training.device == "cuda" and not training.pool
    for key, is_wrong, text in (
        ("staleness.limit", config.staleness.limit > 0, "a rank that trains does not sample: write limit = 0"),
        ("generation.engine", not engine.is_own, f'{engine.title} has processes of its own: write engine = "torch"'),
        ("generation.replicas", generation.replicas > 1, "ranks of the trainer are the replicas: write replicas = 1"),
        (
            "generation.layout_tp",
            generation.layout_tp > 1,
            "it is of vLLM, and ranks of the trainer share out layers by generation.layout: write layout_tp = 1",
        ),
        ("generation.stored_samples", bool(generation.stored_samples), "nothing is sampled: remove one of them"),
        ("generation.pool", bool(generation.pool), "ranks sample on their own devices: name training.pool alone"),
        (
            "generation.device",
            generation.device != device and not training.pool,
            f'ranks sample on the device that they train on: write device = "{device}"',
        ),
        ("training.pool", spread, "ranks need a GPU each that is theirs by name: write a pool with as many devices"),
        ("training.layout", training.layout.ep > 1, "ep is not supported beside sampling: write ep = 1"),
        ("fleet.wire", fleet.wire == "inproc", 'the trainer needs a process of its own: write wire = "ipc"'),
        ("fleet.joined", "training" in fleet.joined, "a trainer that joins does not sample: remove training"),
        ("acting.env", bool(config.acting.env), "policies that act sample in workers of their own: remove one of them"),
    ):
        if is_wrong:
            yield Problem(key, "", f'{text}, or write generation.colocate = "none"', ("generation.colocate",))


def _group_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what keeps ranks of the trainer from sampling in groups."""
    generation = config.generation
    trained = config.training.layout
    if (chosen := generation.layout).size == 1:
        return
    ones = ", ".join(f"{axis} = 1" for axis in chosen.shared_out)
    one = f"or write generation.layout = {{ {ones} }}"
    other = "" if generation.engine_facts.is_own else f" and layout_tp for {generation.engine_facts.title}"
    apart = "ranks of the trainer sample together, which"
    rules = [
        (
            "generation.colocate",
            generation.colocate != "training",
            f'{apart} needs colocate = "training": write that, {one}{other}',
        ),
        *(
            ("training.layout", bool(text), text)
            for axis, size in chosen.shared_out.items()
            for text in [_undivided(axis, getattr(trained, axis), size)]
        ),
        ("environment.use", bool(config.environment.use), f"{apart} was never tried with episodes: remove it, {one}"),
        (
            "training.router_replay",
            config.training.router_replay,
            f"{apart} keeps no record of experts: write router_replay = false, {one}",
        ),
    ]
    for key, is_wrong, text in rules:
        if is_wrong:
            yield Problem(key, "", text, ("generation.layout",))


def _undivided(axis: str, trained: int, size: int) -> str:
    """Returns why so many ranks of an axis cannot share out what those of the trainer hold; "" where they can."""
    if trained % size == 0:
        return ""
    divisors = [number for number in range(1, trained + 1) if trained % number == 0]
    near = {max(each for each in divisors if each <= size), min((each for each in divisors if each > size), default=1)}
    choice = " or ".join(f"{{ {axis} = {each} }}" for each in sorted(near - {1})) or f"{{ {axis} = 1 }}"
    what = {"pp": "stages", "tp": "slices of each layer"}[axis]
    return (
        f"{axis} = {trained} {what} cannot be shared out as generation.layout.{axis} = {size} asks: write "
        f"generation.layout = {choice}, or training.layout.{axis} = {size}"
    )


def joinable(config: Experiment) -> dict[str, int]:
    """Returns the services whose workers can run on any host as the config is, with how many. Trainer and critics
    need the run directory, so they are among them only where `fleet.joined` says so."""
    stay = set(ONE_REPLICA) - config.fleet.joined.keys()
    stay |= set() if config.generation.engine_facts.reads("tcp") else {"generation", "evaluation"}
    stay |= {"reward"} if config.feedback.asks else set()
    stay |= {service for service, layout in layouts(config).items() if service not in ONE_REPLICA and layout.size > 1}
    return {service: count for service, count in _replicas(config).items() if service not in stay}


def _replicas(config: Experiment) -> dict[str, int]:
    """Returns the services of an experiment whose workers may join, with the number of their workers."""
    found = {"generation": config.generation.replicas, "reward": config.reward.replicas}
    if config.generation.colocate != "none":
        del found["generation"]  # They are inside the trainer's processes.
    found["training"] = config.training.layout.size
    if config.algorithm.advantage == "gae":
        found["critic"] = 1
    if config.evaluate.is_on:
        found["evaluation"] = config.evaluate.replicas
    if config.reference_by_service:
        found["reference"] = config.reference.replicas
    if config.algorithm.constraint == "lagrangian":
        found |= {"cost": config.cost.replicas, "cost_critic": 1}
    if config.environment.use:
        found["environment"] = config.environment.replicas
    return found


def process_of(config: Experiment, service: str) -> str:
    """Returns the service in whose processes a service runs: its own, or that of the trainer."""
    return "training" if service == "generation" and config.generation.colocate != "none" else service


def pools_of(config: Experiment) -> dict[str, DevicePool]:
    return {name: section.pool(name) for name, section in config.pools.items()}


def services_of(config: Experiment) -> list[str]:
    """Returns the services of the experiment, in the order in which they choose from a pool."""
    there = {
        "critic": config.algorithm.advantage == "gae",
        "cost": config.algorithm.constraint == "lagrangian",
        "cost_critic": config.algorithm.constraint == "lagrangian",
        "reference": config.reference_by_service,
        "environment": bool(config.environment.use),
        "evaluation": config.evaluate.is_on,
    }
    return [name for name in (*COMPUTING, "environment", "evaluation") if there.get(name, True)]


def pool_names(config: Experiment) -> dict[str, str]:
    """Returns the pool of each service of the experiment that names one. Evaluation is in generation's by default."""
    own = {name: getattr(config, name).pool for name in (*COMPUTING, "environment")}
    own["evaluation"] = config.evaluate.pool or config.generation.pool
    return {name: own[name] for name in services_of(config) if own[name]}


def replicas_of(config: Experiment, service: str) -> int:
    """Returns the replicas of a service; 0 where its work is done inside the trainer's ranks."""
    if service in ONE_REPLICA:
        return 1
    if process_of(config, service) != service:
        return 0
    return int(getattr(config, "evaluate" if service == "evaluation" else service).replicas)


def demands(config: Experiment) -> list[Demand]:
    """Returns what each service with a pool asks of it."""
    found = []
    for name, pool in pool_names(config).items():
        layout = rank_layout(layouts(config)[name]) if name in layouts(config) else Layout()
        each = config.generation.layout_tp if name in ("generation", "evaluation") else 1
        found.append(Demand(name, pool, replicas_of(config, name) * layout.size, each, layout))
    return found


def assignment(config: Experiment) -> Assignment:
    """Returns the devices of all workers with a pool. Raises ConfigError for a pool that does not fit."""
    return assign(pools_of(config), demands(config))


def pool_key(service: str) -> str:
    """Returns the config key that names the pool of a service."""
    return "evaluate.pool" if service == "evaluation" else f"{service}.pool"


def pool_problems(config: Experiment) -> Iterator[Problem]:
    """Yields what is wrong about pools: those that do not exist or are too small, and hosts whose workers do not
    join."""
    pools = pools_of(config)
    fitting = []
    for demand in demands(config):
        try:
            assign(pools, [demand])
        except ConfigError as error:
            yield Problem(pool_key(demand.service), "", str(error), (f"pools.{demand.pool}",))
            continue
        fitting.append(demand)
        pool = pools[demand.pool]
        if pool.hosts and demand.service not in config.fleet.joined:
            text = (
                f"pool {pool.name!r} is of hosts that join, and {demand.service} workers do not: write "
                f"fleet.joined = {{ {demand.service} = {demand.workers} }}, or a pool of this host's devices"
            )
            yield Problem(pool_key(demand.service), "", text, ("fleet.joined",))
    for name in sorted(set(pools) - set(pool_names(config).values())):
        yield Problem("pools", "", f"no service runs in pool {name!r}: remove it", is_warning=True)


def place_services(config: Experiment) -> None:
    """Sets the device of each section whose service is in a pool to that of its first worker. Workers that have others
    read them in their specification. Leaves a config alone whose pools `pool_problems` refuses."""
    try:
        found = assignment(config)
    except ConfigError:
        return
    for name in COMPUTING:
        if (place := process_of(config, name)) in found:
            device = str(found[place][0][0].device)
            section = getattr(config, name).model_copy(update={"device": device})
            object.__setattr__(config, name, section)


HERE = ""
"""Name of the host of the controller, whatever it is called."""
ANY_HOST = "<host that joins>"
"""Name of a host that nothing names before it joins. Two workers on such hosts may be on one, or on two."""


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """A worker and where it runs. number: among all workers of its service, in the order of replica and rank. host:
    HERE, ANY_HOST, or one that a pool names. devices: several for one worker that leads processes of its own. joins:
    whether it comes over the network, and so shares no memory with others."""

    service: str
    number: int
    ranks: int
    host: str
    devices: tuple[Device, ...]
    joins: bool

    @property
    def name(self) -> str:
        return f"{self.service}{self.number // self.ranks}.{self.number % self.ranks}"

    @property
    def places(self) -> tuple[DevicePlace, ...]:
        return tuple(DevicePlace(self.host, device) for device in self.devices)

    @property
    def on_gpu(self) -> bool:
        return CPU not in self.devices

    def may_share_memory(self, other: "PlacedWorker") -> bool:
        """Returns whether both are processes of one host that map the same memory."""
        return self.host == other.host and not (self.joins or other.joins)

    def shares_gpu(self, other: "PlacedWorker") -> bool:
        """Returns whether both certainly have a GPU in common. Hosts without a name may be two."""
        return self.on_gpu and self.host != ANY_HOST and not set(self.places).isdisjoint(other.places)


@dataclass(frozen=True, slots=True)
class Placement:
    """Holds where the workers of each service of a config run. layouts: of the ranks of a replica. pooled: devices of
    the workers with a pool, and behind them those that further workers would get."""

    workers: Mapping[str, tuple[PlacedWorker, ...]]
    layouts: Mapping[str, Layout]
    pooled: Assignment

    @classmethod
    def of(cls, config: Experiment) -> "Placement":
        """Raises ConfigError for a pool that does not fit."""
        pooled = assignment(config)
        ranks = {name: rank_layout(layout) for name, layout in layouts(config).items()}
        found = {}
        for service in services_of(config):
            size = ranks.get(service, Layout()).size
            joins = service in config.fleet.joined
            unnamed = ANY_HOST if joins else HERE
            count = replicas_of(config, service) * size
            usual = [(DevicePlace(unnamed, device_of(config, service, number, size)),) for number in range(count)]
            found[service] = tuple(
                PlacedWorker(service, number, size, each[0].host or unnamed, tuple(at.device for at in each), joins)
                for number, each in enumerate(pooled.get(service, usual)[:count])
            )
        return cls(found, ranks, pooled)

    @property
    def trainer(self) -> PlacedWorker:
        """Returns the rank that publishes weights."""
        return self.workers["training"][0]

    @property
    def readers(self) -> tuple[PlacedWorker, ...]:
        """Returns the workers that read published weights."""
        return (*self.workers["generation"], *self.workers.get("evaluation", ()))

    def crossings(self) -> Iterator[str]:
        """Yields a sentence for each kind of groups of ranks that lie on several hosts, as far as hosts are named."""
        for service, workers in self.workers.items():
            hosts = [each.host for each in workers[: workers[0].ranks]] if workers else []
            if len(set(hosts) - {ANY_HOST}) > 1:
                yield from crossings(service, self.layouts[service], hosts)


def device_of(config: Experiment, service: str, number: int = 0, ranks: int = 1) -> Device:
    """Returns the device of a worker as its section names it, with a number. Ranks on "cuda" take one GPU each."""
    section = getattr(config, "generation" if service == "evaluation" else service)
    if service in config.scorers and not section.model:
        return CPU  # Functions run in child processes.
    device = getattr(section, "device", CPU)
    return Device(f"cuda:{number % ranks}") if device == "cuda" else Device(device)
