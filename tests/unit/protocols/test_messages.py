import inspect
import re
from hashlib import sha256
from itertools import starmap
from typing import Any

import pytest

from asyncrl.protocols.messages import PROTOCOL, WIRE_TYPES, Score
from asyncrl.protocols.service_contracts import Critic, Environment, Generation, Reference, Reward, Training

KNOWN = (40, "22368423be6dd97b")
"""The number of the protocol, and the digest of what its messages and calls are made of."""


def described(name: str, hint: Any) -> str:
    """numpy writes its types in a way of its own in each version, and a class may move to another module."""
    return f"{name}: {'array' if 'numpy' in str(hint) else without_modules(str(hint))}"


def without_modules(text: str) -> str:
    return re.sub(r"\basyncrl(\.\w+)+\.", "", text)


def test_messages_and_endpoints_change_with_the_number_of_the_protocol_only() -> None:
    """Two sides that greet each other with the same number have to understand each other."""
    fields = {wire.__name__: starmap(described, wire.__annotations__.items()) for wire in WIRE_TYPES}
    messages = [f"{name}({', '.join(of_message)})" for name, of_message in fields.items()]
    calls = [
        without_modules(f"{contract.__name__}.{name}{inspect.signature(getattr(contract, name))}")
        for contract in (Generation, Environment, Reward, Reference, Critic, Training)
        for name in sorted(contract.endpoints)
    ]
    digest = sha256("\n".join(messages + calls).encode()).hexdigest()[:16]
    assert (PROTOCOL, digest) == KNOWN, (
        f"messages or endpoints changed: raise PROTOCOL beside WIRE_TYPES, and note ({KNOWN[0] + 1}, {digest!r}) here"
    )


def test_a_score_is_split_into_its_turns_and_what_belongs_to_none_comes_last() -> None:
    assert Score(1.5, {}, "", (0.25, 0.5, 0.25)).by_turn(3) == (0.25, 0.5, 0.75)
    assert Score(1.5, {}).by_turn(3) == (0.0, 0.0, 1.5)
    assert Score(1.5, {}, "", (1.0,)).by_turn(1) == ()
    assert Score(None, {}, "the environment failed").by_turn(3) == ()
    with pytest.raises(AssertionError, match="parts for 2 turns of an episode of 3"):
        Score(1.5, {}, "", (1.0, 0.5)).by_turn(3)
