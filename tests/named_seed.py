"""Names the seed of a random schedule in the error of what runs with it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def named_seed(seed: int, advice: str = "") -> Iterator[None]:
    """Raises AssertionError with the seed for any error. advice: what to do with the seed."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}{advice}") from error
