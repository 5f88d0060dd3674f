"""The report of a receiver about one version."""

from typing import NamedTuple


class Fetched(NamedTuple):
    """Says what it took to bring a version here. bytes: that crossed a network or were read. error: the largest share
    of rounding of any part: the root mean square of its errors over that of its weights; 0 if all are exact."""

    bytes: int = 0
    error: float = 0.0
