"""Describes the runs that are simulated, and holds what a run gave."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.controller.gate.gate import Gate
from asyncrl.simulation.fakes.fake_service import Pace
from asyncrl.simulation.fakes.generation import Lengths, stragglers
from asyncrl.simulation.fakes.scoring import MANY
from asyncrl.simulation.fakes.training import StepCost
from asyncrl.simulation.resumable_run import RunShape


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Gives the mean seconds between two deaths of a worker, of the controller with its trainer, and between two losses
    of a row; 0 means never. power: share of the controller's deaths that are power cuts, which lose unsynced bytes.
    restart: seconds until a worker is back."""

    generation: float = 0.0
    reward: float = 0.0
    reference: float = 0.0
    row: float = 0.0
    controller: float = 0.0
    power: float = 0.0
    restart: float = 5.0


@dataclass(frozen=True, slots=True)
class Scenario(RunShape):
    """Describes a run to simulate.

    reference, critic: delay of a call, None without the service. The algorithm is GRPO; ReMax with `greedy`; PPO with a
    critic; Safe RLHF if it is also `constrained`, with a cost service and a cost critic as slow as reward and critic.
    reward_calls: calls that the reward service works on at one time. pace: by how much longer the work of a service
    takes, by its name. thorough: compare gate and journal after every event instead of after every step.
    """

    groups: int = 8
    members: int = 8
    limit: int = 2
    slots: int = 192
    cut_at: int | None = 4
    steps: int = 20
    checkpoint_every: int = 2
    lengths: Lengths = field(default_factory=lambda: stragglers(100, 0.05, 10))
    token_time: float = 0.1
    cost: StepCost = field(default_factory=lambda: StepCost(4.0))
    reward_delay: float = 0.1
    reward_calls: int = MANY
    reference: float | None = None
    critic: float | None = None
    constrained: bool = False
    faults: FaultRates = FaultRates()
    deadline: float = 1e6
    thorough: bool = True
    gate_class: type[Gate] = Gate
    pace: Mapping[str, Pace] = field(default_factory=dict)


@dataclass
class SimulationResult:
    """Holds the numbers of a run since its last resume.

    digest: hash of every event with its time, and of the journal. idle: share of the time in which the trainer had no
    batch to train. generating: seconds of all generation slots. lengths: tokens of each (group, member) that left the
    engine. live: tokens within the limit of each sample that was trained; in_loss: tokens in the loss, older ones
    included. dropped: reason of each dropped sample. deaths: how often the run was resumed. restored: samples that the
    last resume took over. staleness: mean of the tokens in the loss, by version of the trainer. in_flight: samples when
    each step begins.
    """

    seconds: float = 0.0
    version: int = 0
    digest: str = ""
    idle: float = 0.0
    generating: float = 0.0
    in_loss: int = 0
    steps_lost: int = 0
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    live: dict[tuple[int, int], int] = field(default_factory=dict)
    dropped: dict[tuple[int, int], str] = field(default_factory=dict)
    attempts_failed: int = 0
    deaths: int = 0
    restored: int = 0
    staleness: dict[int, float] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)

    @property
    def live_tokens(self) -> int:
        return sum(self.live.values())
