"""Sums and means over the tokens of each row, of flat tensors that hold the tokens of several rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """index: int64 [tokens], the row of each token. lengths: float32 [rows], tokens of each row; may be 0."""

    index: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | None = None) -> "Rows":
        """Row after row, with so many tokens each."""
        counts = torch.tensor(lengths, dtype=torch.int64)
        index = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        return cls(index.to(device), counts.to(device, torch.float32))

    def sum(self, values: Tensor) -> Tensor:
        """[tokens] -> [rows]; a row without tokens has 0. Passes the gradient on."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """[tokens] -> [rows]; a row without tokens has 0. Passes the gradient on."""
        return self.sum(values) / self.lengths.clamp(min=1).to(values.dtype)

    def spread(self, values: Tensor) -> Tensor:
        """[rows] -> [tokens]: every token gets the value of its row."""
        return values[self.index]
