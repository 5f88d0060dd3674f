"""Keys and values of every sequence that runs: one slot a sequence, all layers."""

from torch import Tensor

FIRST_LENGTH = 64  # positions allocated at first; grows by doubling, so short sequences need little memory


class KVCache:
    """Per layer keys and values [slots, kv heads, length, head size], allocated when a layer first writes.

    Fresh memory is zero: attention multiplies what it masks by 0, and 0 times an uninitialised NaN is NaN.

    Args:
        limit: positions of the longest sequence.
        fixed: allocate `limit` positions at once, so that shapes never change.
    """

    def __init__(self, slots: int, limit: int, *, fixed: bool = False) -> None:
        self.limit = limit
        self._slots = slots
        self._length = limit if fixed else min(FIRST_LENGTH, limit)
        self._layers: list[tuple[Tensor, Tensor]] = []

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` positions."""
        assert length <= self.limit, f"a sequence of {length} positions in slots of {self.limit}"
        if length > self._length:
            self._length = min(max(length, 2 * self._length), self.limit)
            self._layers = [(self._grown(keys), self._grown(values)) for keys, values in self._layers]

    def write(self, layer: int, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys[i], values[i] ([tokens, kv heads, head size]) at (rows[i], positions[i]); the whole layer."""
        if layer == len(self._layers):
            self._layers.append((self._new(keys), self._new(values)))
        cached_keys, cached_values = self._layers[layer]
        cached_keys[rows, :, positions] = keys
        cached_values[rows, :, positions] = values
        return cached_keys, cached_values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot over another's."""
        for keys, values in self._layers:
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def _new(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._slots, like.shape[1], self._length, like.shape[2])

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(old.shape[0], old.shape[1], self._length, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new
