"""Keeps the rows of a step until their texts are read: training may end before, and would free them."""

from collections import Counter
from collections.abc import Callable, Iterable

from asyncrl.controller.journal.ledger import SampleKey
from asyncrl.protocols.batch import SampleName


class ShownRows:
    """Samples of steps whose texts have yet to be read: what is released of them meanwhile waits until then."""

    def __init__(self) -> None:
        self._release: Callable[[Iterable[SampleName]], None] = lambda names: None
        self._uses = Counter[SampleKey]()
        self._waiting: dict[SampleKey, list[SampleName]] = {}

    @property
    def waiting(self) -> int:
        """Returns the number of samples that were released and wait."""
        return len(self._waiting)

    def released_by(self, release: Callable[[Iterable[SampleName]], None]) -> None:
        """Takes the function that releases what has waited."""
        self._release = release

    def keep(self, samples: Iterable[SampleKey]) -> None:
        self._uses.update(samples)

    def let_go(self, samples: Iterable[SampleKey]) -> None:
        """Ends one `keep` of each of these samples, and releases those that nobody reads any more."""
        free: list[SampleName] = []
        for key in samples:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                free += self._waiting.pop(key, ())
        if free:
            self._release(free)

    def take(self, names: Iterable[SampleName]) -> list[SampleName]:
        """Returns those that may be released now; the others wait."""
        free = []
        for name in names:
            if name[:2] in self._uses:
                self._waiting.setdefault(name[:2], []).append(name)
            else:
                free.append(name)
        return free

    def oldest(self, in_flight: int) -> int:
        """Returns the first group whose rows a service has to keep, given the first one in flight."""
        return min((in_flight, *(group for group, _ in self._uses)))
