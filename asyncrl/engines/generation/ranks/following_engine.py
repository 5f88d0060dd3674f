"""The engine of a rank that follows: it repeats the calls of the rank that leads its replica."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.generation.ranks.engine_calls import Call, request_of, tokens_of
from asyncrl.engines.generation.scheduling.sample_requests import NO_WEIGHTS
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.training.ranks.rank_mesh import RankMesh

NOTHING_NEW: Mapping[str, Tensor] = {}


class FollowingEngine(TorchEngine):
    """A TorchEngine that applies what a LeadingEngine tells. Its clock stands where the leader's stood at the call, so
    that both find the same deadlines over."""

    def __init__(self, folder: Path, config: Config, version: int = NO_WEIGHTS, *, ranks: RankMesh) -> None:
        super().__init__(folder, config, version, ranks)
        self._now = 0.0
        self._batch.clock = lambda: self._now

    def apply(self, call: Call, weights: Mapping[str, Tensor] = NOTHING_NEW) -> None:
        """Repeats a call; all steps of a slice are one. weights: of the version that a call loads, which the engine
        keeps. Raises PeerLost when another rank is gone or late."""
        name, self._now, *args = call
        match name:
            case "step":
                self._step_with_leader()
            case "submit":
                self.submit(*map(request_of, args[0]))
            case "end":
                self.end([_three(key) for key in args[0]], args[1])
            case "forget":
                self.forget([_three(sample) for sample in args[0]], args[1])
            case "load":
                self.load(weights, args[0], share=True)
            case "put_away":
                self.put_away()
            case "begin_again":
                self.begin_again()
            case _:
                assert name == "logprobs_after", f"the leader told {name!r}"
                self.logprobs_after(tokens_of(args[0]))

    def _step_with_leader(self) -> None:
        while not math.isnan(now := self._announced()):
            self._now = now
            self.step()

    def _announced(self) -> float:
        return float(self._ranks.everyone.shared(torch.zeros(1, dtype=torch.float64), 0))


def _three(numbers: list[Any]) -> tuple[int, int, int]:
    first, second, third = numbers
    return first, second, third
