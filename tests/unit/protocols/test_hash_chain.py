"""The chain depends on what was trained and in which iteration, not on the order within it."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocols.hash_chain import GENESIS, chain

KEYS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 2)), unique=True)


@given(KEYS)
def test_order_of_arrival_does_not_matter(keys: list[tuple[int, int, int]]) -> None:
    assert chain(GENESIS, sorted(keys)) == chain(GENESIS, reversed(keys)) == chain(GENESIS, keys)


@given(KEYS, KEYS)
def test_other_samples_or_other_iterations_give_another_chain(
    one: list[tuple[int, int, int]], two: list[tuple[int, int, int]]
) -> None:
    assert (chain(GENESIS, one) == chain(GENESIS, two)) == (sorted(one) == sorted(two))
    assert chain(chain(GENESIS, one), two) != chain(GENESIS, [*one, *two])


def test_the_link_is_what_the_docstring_says() -> None:
    key = (1).to_bytes(8, "big") + (0).to_bytes(8, "big") + (2).to_bytes(8, "big")
    assert chain(GENESIS, [(1, 0, 2)]) == sha256(bytes(32) + key).digest()
