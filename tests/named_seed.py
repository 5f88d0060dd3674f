"""Names the seed of a random schedule in the error of what runs with it, and leaves most seeds to the job `nightly`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def named_seed(seed: int, advice: str = "") -> Iterator[None]:
    """Raises AssertionError with the seed for any error. advice: what to do with the seed."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}{advice}") from error


def starts(core: int, seeds: int, part: int) -> list[Any]:
    """Returns the first seed of each part of so many seeds; the job `nightly` alone tries those from `core` on."""
    return [pytest.param(start, marks=pytest.mark.long) if start >= core else start for start in range(0, seeds, part)]
