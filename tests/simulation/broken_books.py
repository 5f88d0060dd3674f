"""Mistakes in the books that both simulations have to find."""

from typing import Any

import pytest

from asyncrl.books import Books


def a_drop_is_not_journaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Books, "_dropped", lambda books, group, members, reason: books._free(group, members))


def trained_is_told_before_it_is_written_down(patch: pytest.MonkeyPatch) -> None:
    """And at every second version the writing is forgotten."""
    whole = Books.trained

    def trained(books: Books, cuts: Any, version: int, advantages: Any, chain: str) -> None:
        if version % 2:
            whole(books, cuts, version, advantages, chain)
        else:
            books.gate.trained(cuts, version)

    patch.setattr(Books, "trained", trained)
