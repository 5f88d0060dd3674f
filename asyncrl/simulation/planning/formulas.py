"""Formulas of the cost model at one level of efficiency: seconds, bytes, and work in floating point operations.

Sources, by letter in the docstrings:
    K  Kaplan et al. 2020 (arXiv 2001.08361): 2 operations a parameter and token forward, twice that backward
    M  Narayanan et al. 2021 (arXiv 2104.04473): pipeline bubble (p - 1) / m; parallel groups of a host first
    R  Williams et al. 2009, roofline: work / compute or bytes / bandwidth, whichever is longer
    C  Thakur et al. 2005, collectives: a ring's all-reduce moves 2 (n - 1) / n of the bytes, a gather (n - 1) / n
    Z  Rajbhandari et al. 2020 (arXiv 1910.02054): bytes of sharded optimizers and parameters
    H  Sheng et al. 2025, HybridFlow (arXiv 2409.19256), table 2: weights that move between two layouts
"""

import math
from dataclasses import dataclass

from asyncrl.simulation.planning.gpus import Rates
from asyncrl.simulation.planning.model_size import WIDE, ModelSize

GRADIENT = 4
OPTIMIZER = 12
"""Bytes of a gradient, and of Adam's moments with the parameter in float32."""
ACTIVATIONS = 34
"""Bytes of activations of a layer for each token and unit of width, with attention recomputed (Korthikanti et al. 2022,
arXiv 2205.05198)."""
OPTIMIZER_TRAFFIC = 2 * OPTIMIZER + GRADIENT + WIDE
"""Bytes that a step of the optimizer reads and writes for each parameter."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Sizes of parallel groups: tensor, pipeline and data. ep: of experts, inside of the data parallel group. shard:
    ranks that share out each copy of the weights, with rows of their own. again: layers are computed again backward."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    shard: int = 1
    again: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.data

    @property
    def data(self) -> int:
        """Returns the ranks with rows of their own."""
        return self.dp * self.shard

    @property
    def replica(self) -> int:
        """Returns the GPUs that hold one copy of the model."""
        return self.tp * self.pp

    def __str__(self) -> str:
        experts = f" ep {self.ep}" if self.ep > 1 else ""
        shards = f" shard {self.shard}" if self.shard > 1 else ""
        return f"pp {self.pp} tp {self.tp} dp {self.dp}{experts}{shards}{' computed again' if self.again else ''}"


def all_reduce(rates: Rates, size: float, group: int, span: int) -> float:
    """Returns seconds of an all-reduce of so many bytes (C). span: consecutive GPUs that hold the group."""
    return rates.latency + 2 * gather(rates, size, group, span) if group > 1 else 0.0


def gather(rates: Rates, size: float, group: int, span: int, stride: int | None = None) -> float:
    """Returns seconds of an all-gather or reduce-scatter whose result or input has so many bytes (C). stride: between
    members of a ring."""
    return (group - 1) / group * size / rates.bandwidth(span, stride)


def forward_work(model: ModelSize, context: float) -> tuple[float, float]:
    """Returns operations of one token forward that attends to `context` tokens, in plain parts and in experts (K)."""
    experts = 2.0 * model.expert_layers * model.chosen * model.expert_parameters
    return 2.0 * model.active_parameters - experts + 4.0 * model.layers * model.attention_width * context, experts


def work_seconds(rates: Rates, peak: float, work: tuple[float, float]) -> float:
    """Returns seconds of one GPU for plain work and work in experts. peak: operations a second of the plain part."""
    return work[0] / peak + work[1] / (peak * rates.experts)


def layer_collectives(model: ModelSize, rates: Rates, tokens: float, degrees: Degrees) -> float:
    """Returns seconds of two all-reduces a layer (M), and of two exchanges of tokens for a layer of experts (C)."""
    size = tokens * model.hidden * WIDE
    found = 2 * model.layers * all_reduce(rates, size, degrees.tp, degrees.tp)
    if degrees.ep > 1 and model.experts:
        exchange = gather(rates, size * model.chosen / degrees.tp, degrees.ep, degrees.replica * degrees.ep)
        found += 2 * model.expert_layers * (rates.latency + exchange)
    return found


def pass_collectives(model: ModelSize, rates: Rates, tokens: float, micro_batch: float, degrees: Degrees) -> float:
    """Returns seconds that one stage of a pipeline spends in the collectives of layers (M, C), forward or backward.
    tokens: of all replicas. micro_batch: tokens of one."""
    passes = tokens / degrees.data / micro_batch
    return passes * layer_collectives(model, rates, micro_batch, degrees) / degrees.pp


def prefill_seconds(model: ModelSize, rates: Rates, tokens: float, length: float, degrees: Degrees) -> float:
    """Returns seconds in which one replica reads `tokens` prompt tokens, in prompts of `length` (R, K)."""
    work = work_seconds(rates, rates.compute, forward_work(model, length / 2)) * tokens / degrees.replica
    weights = WIDE * model.parameters / degrees.replica / rates.memory
    return max(work, weights) + layer_collectives(model, rates, tokens, degrees)


def decode_step_seconds(model: ModelSize, rates: Rates, sequences: float, context: float, degrees: Degrees) -> float:
    """Returns seconds in which one replica samples a token of each sequence (R).

    It reads each weight once for every pipeline micro-batch, only those experts that some token chose, and all keys and
    values. sequences: of the replica. context: mean tokens that a sequence has so far.
    """
    each = max(1.0, sequences / degrees.pp)
    experts = model.touched_experts(each * degrees.ep) / degrees.ep * model.expert_layers * model.expert_parameters
    weights = WIDE * (model.plain_parameters + experts) / degrees.tp
    cached = sequences * context * model.cache_bytes / degrees.replica
    work = work_seconds(rates, rates.compute, forward_work(model, context)) * sequences / degrees.replica
    return max((weights + cached) / rates.memory, work) + rates.step + layer_collectives(model, rates, each, degrees)


def generation_seconds(
    model: ModelSize, rates: Rates, sequences: int, prompt: int, response: int, degrees: Degrees, room: int
) -> float:
    """Returns seconds in which one replica generates answers that all have the same length (R).

    room: sequences whose keys and values fit at one time; more are generated in equal waves.
    """
    waves = math.ceil(sequences / room)
    each = sequences / waves
    filled = prefill_seconds(model, rates, each * prompt, prompt, degrees)
    return waves * (filled + response * decode_step_seconds(model, rates, each, prompt + response / 2, degrees))


def scoring_seconds(
    model: ModelSize, rates: Rates, samples: int, length: float, degrees: Degrees, micro_batch: int = 1
) -> float:
    """Returns seconds of a forward pass over all samples in the training layout (K), with the pipeline's bubble (M)."""
    work = work_seconds(rates, rates.training, forward_work(model, length / 2)) * samples * length / degrees.gpus
    work += pass_collectives(model, rates, samples * length, length * micro_batch, degrees)
    gathered = math.ceil(samples / degrees.data / micro_batch) * shard_seconds(model, rates, degrees)
    return work * bubble(samples, degrees, micro_batch) + gathered


def training_seconds(
    model: ModelSize, rates: Rates, samples: int, length: float, degrees: Degrees, updates: int, micro_batch: int = 1
) -> float:
    """Returns seconds of `updates` optimizer steps that share these samples (K: three forward passes, and a fourth one
    where layers are computed again; M: bubble).

    Each update reduces gradients in float32 and gathers parameters among data parallel ranks (C, Z), without overlap,
    and its optimizer reads and writes its shard once. Shards are gathered twice in each pass, and their gradients
    scattered once.
    """
    forward = forward_work(model, length / 2)
    again = int(degrees.again)
    work = (3 + again) * work_seconds(rates, rates.training, forward) * samples * length / degrees.gpus
    work += (2 + again) * pass_collectives(model, rates, samples * length, length * micro_batch, degrees)
    work *= bubble(max(1, samples // updates), degrees, micro_batch)
    optimizer = OPTIMIZER_TRAFFIC * model.parameters / degrees.gpus / rates.memory
    passes = math.ceil(samples / updates / degrees.data / micro_batch)
    each = optimizer + gradient_seconds(model, rates, degrees) + 3 * passes * shard_seconds(model, rates, degrees)
    return work + updates * each


def shard_seconds(model: ModelSize, rates: Rates, degrees: Degrees) -> float:
    """Returns seconds in which ranks gather the weights of which each has a shard, in float32 (C)."""
    size = GRADIENT * model.parameters / degrees.replica
    return gather(rates, size, degrees.shard, degrees.replica * degrees.shard, degrees.replica)


def bubble(samples: int, degrees: Degrees, micro_batch: int) -> float:
    """Returns by how much longer a pass takes with pipeline stages that fill and drain: (m + p - 1) / m (M)."""
    count = max(1, math.ceil(samples / degrees.data / micro_batch))
    idle = count * degrees.data * micro_batch / samples  # Ranks without a sample wait for the others.
    return (count + degrees.pp - 1) / count * max(1.0, idle)


def gradient_seconds(model: ModelSize, rates: Rates, degrees: Degrees) -> float:
    """Returns seconds in which data parallel ranks exchange gradients and parameters of one update (C, Z)."""
    routed = model.parameters - model.plain_parameters
    size = GRADIENT + WIDE
    stride = degrees.replica * degrees.shard
    plain = gather(rates, size * model.plain_parameters / stride, degrees.dp, degrees.gpus, stride)
    spread = max(1, degrees.dp // degrees.ep)
    return plain + gather(rates, size * routed / stride / degrees.ep, spread, degrees.gpus, stride * degrees.ep)


def sharded_training_seconds(
    model: ModelSize, rates: Rates, samples: int, length: float, gpus: int, updates: int, micro_batch: int
) -> float:
    """Returns seconds of updates with fully sharded parameters: each micro-batch gathers them twice and scatters
    gradients once (Z: 3 sizes of the model)."""
    degrees = Degrees(dp=gpus)
    work = 3 * work_seconds(rates, rates.training, forward_work(model, length / 2)) * samples * length / gpus
    passes = updates * max(1, math.ceil(samples / updates / gpus / micro_batch))
    moved = 3 * gather(rates, WIDE * model.parameters, gpus, gpus, 1)
    optimizer = OPTIMIZER_TRAFFIC * model.parameters / gpus / rates.memory
    return work * bubble(max(1, samples // updates), degrees, micro_batch) + passes * moved + updates * optimizer


def transition_share(train: Degrees, generate: Degrees, mechanism: str) -> float:
    """Returns the share of the model that each GPU receives when layouts change (H).

    mechanism: "hybridflow", with generation groups that reuse each GPU's own weights; "regrouped", with groups of
    consecutive ranks; "sharded", which gathers all of the model as DeepSpeed-Chat does; "copied", from other GPUs.
    """
    replica = train.replica
    everything = train.gpus
    if mechanism == "hybridflow":
        return (replica - generate.replica) / (generate.replica * replica)
    return {"regrouped": (replica - 1) / replica, "sharded": (everything - 1) / everything, "copied": 1.0}[mechanism]


def transition_seconds(
    model: ModelSize, rates: Rates, train: Degrees, generate: Degrees, mechanism: str = "hybridflow"
) -> float:
    """Returns seconds in which weights move from the training to the generation layout on the same GPUs (H, C)."""
    span = train.replica if mechanism in ("hybridflow", "regrouped") else max(train.gpus, rates.gpus_per_host + 1)
    stride = 1 if mechanism == "sharded" else None
    return transition_share(train, generate, mechanism) * WIDE * model.parameters / rates.bandwidth(span, stride)


def transfer_seconds(model: ModelSize, rates: Rates, senders: int, generate: Degrees) -> float:
    """Returns seconds in which new weights reach generators on other GPUs: each GPU takes in its shard over the
    network, and the senders send the model once, in a pipeline through the receivers (C)."""
    size = WIDE * model.parameters
    return max(size / senders, size / generate.replica) / rates.network


def training_bytes(model: ModelSize, degrees: Degrees, length: float, micro_batch: int = 1) -> float:
    """Returns bytes of a GPU that trains: weights, gradients, its shard of the optimizer (Z), and activations of the
    micro-batches that a pipeline holds at one time."""
    routed = model.parameters - model.plain_parameters
    held = model.plain_parameters / degrees.replica + routed / degrees.replica / degrees.ep
    states = (WIDE + GRADIENT) * held + OPTIMIZER * model.parameters / degrees.gpus
    return states + ACTIVATIONS * micro_batch * length * model.hidden * model.layers / degrees.tp


def scoring_bytes(model: ModelSize, degrees: Degrees, length: float, micro_batch: int = 1) -> float:
    """Returns bytes of a GPU that scores: weights, and the widest activations of one layer."""
    weights = WIDE * model.parameters / degrees.replica
    return weights + ACTIVATIONS * micro_batch * length * model.hidden / degrees.tp


def room_for(model: ModelSize, free: float, context: float, degrees: Degrees) -> int:
    """Returns how many sequences of `context` tokens fit into the free bytes of each GPU of a replica."""
    return max(0, int(free * degrees.replica / (context * model.cache_bytes)))
