"""The value targets, reward and cost: which columns, settings and share of the KL penalty the critic of each uses."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import AlgorithmConfig, Config, CriticConfig
from asyncrl.engines.training.interface import TrainRow


@dataclass(frozen=True, slots=True)
class ValuedSample:
    """Holds the score of a sample and the values that a critic gave it.

    score: reward or cost of the whole sample. values: float32 [tokens], before each token was sampled. valued_at:
    optimizer steps that the critic had taken then.
    """

    score: float
    values: NDArray[np.float32]
    valued_at: int


@dataclass(frozen=True, slots=True)
class ValueTarget:
    """Names what a critic learns to predict.

    critic: name of its service, config section, checkpoint folder and metrics prefix. values, valued_at: the columns
    that it writes.
    """

    critic: Literal["critic", "cost_critic"]
    values: str
    valued_at: str

    def of(self, row: TrainRow) -> ValuedSample:
        """Reads score and values of this target from a row."""
        values, valued_at = (row.cost_values, row.cost_valued_at) if self is COST else (row.values, row.valued_at)
        score = row.cost if self is COST else row.advantage
        assert values is not None, f"sample {row.key} has no values of the {self.critic}"
        assert score is not None, f"sample {row.key} has no cost"
        return ValuedSample(float(score), values, valued_at)

    def settings(self, config: Config) -> CriticConfig:
        return config.cost_critic if self is COST else config.critic

    def kl_share(self, algorithm: AlgorithmConfig) -> float:
        """Returns the share of the KL penalty that this target bears.

        With costs, half of the penalty is subtracted from the reward and half is added to the cost, so that its weight
        does not depend on the multiplier (Safe RLHF, arXiv 2310.12773, appendix B).
        """
        if algorithm.constraint == "none":
            return 1.0
        return -0.5 if self is COST else 0.5


REWARD = ValueTarget("critic", "values", "valued_at")
COST = ValueTarget("cost_critic", "cost_values", "cost_valued_at")
VALUE_TARGETS = {target.critic: target for target in (REWARD, COST)}
