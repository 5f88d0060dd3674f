"""Ragged rows stored as one flat tensor: sums and means over the tokens of each row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ragged:
    """Describes how flat tokens belong to rows.

    index: int64 [tokens], the row of each token. lengths: float32 [rows], the number of tokens of each row, 0 included.
    """

    index: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | None = None) -> "Ragged":
        """Builds the description of rows that follow each other with these lengths."""
        counts = torch.tensor(lengths, dtype=torch.int64)
        index = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        return cls(index.to(device), counts.to(device, torch.float32))

    def sum(self, values: Tensor) -> Tensor:
        """Sums [tokens] to [rows], with gradient; an empty row gives 0."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """Averages [tokens] to [rows], with gradient; an empty row gives 0."""
        return self.sum(values) / self.lengths.clamp(min=1).to(values.dtype)

    def spread(self, values: Tensor) -> Tensor:
        """Expands [rows] to [tokens]: every token gets the value of its row."""
        return values[self.index]
