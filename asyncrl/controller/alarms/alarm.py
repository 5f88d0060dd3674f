"""The one counter behind every alarm of a run."""

from dataclasses import dataclass


@dataclass(slots=True)
class Alarm:
    """Counts one kind of trouble: the first occurrences in a row are reported, too many in a row end the run.

    reported: how many occurrences in a row are reported. limit: how many in a row end the run; None: no number does.
    total: all occurrences so far. in_a_row: occurrences since the last `clear`.
    """

    reported: int = 0
    limit: int | None = None
    total: int = 0
    in_a_row: int = 0

    def count(self, times: int = 1) -> bool:
        """Counts occurrences and returns whether they are to be reported."""
        self.total += times
        self.in_a_row += times
        return self.in_a_row <= self.reported

    def clear(self) -> None:
        """Begins a new row after something went well."""
        self.in_a_row = 0

    @property
    def ends_run(self) -> bool:
        """Returns whether as many occurrences followed one another as end the run."""
        return self.limit is not None and self.in_a_row >= self.limit
