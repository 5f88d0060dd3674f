import inspect
from hashlib import sha256
from itertools import starmap
from typing import Any

import pytest

from asyncrl.protocols.messages import PROTOCOL, WIRE_TYPES, Score
from asyncrl.protocols.service_contracts import Critic, Environment, Generation, Reference, Reward, Training

DIGESTS = {
    4: "91705afc5d8c409a",
    5: "b5f7ad8ced3da9d4",
    6: "ef8bf9c883dbfb70",
    7: "a1cc239912214f17",
    8: "d16c5af0a4acb893",
    9: "6f29b440aa2f8c60",
    10: "c8bf42e41ef597aa",
    11: "2c72f9e5864ecc90",
    12: "5232dbe73271673f",
    13: "15026719780ed870",
    14: "0ea7b132d4857811",
    15: "e8d0e2a838f81a99",
    16: "bdc43945bbd94c14",
    17: "e2122d009594170f",
    18: "989059f1100b0d0b",
    19: "088484b948935607",
    20: "809e38b6819343cf",
    21: "809e38b6819343cf",
    24: "8e0f6ee107e94ed9",
    25: "5c19c504b11faf34",
    26: "9048ad32f759a7b0",
    27: "60f9e279c28cacd2",
    28: "940540794494535f",
    29: "36cb056e07297dbd",
    30: "7e1619c6f665ab23",
    31: "6ce4c1ecc5254a04",
    32: "cd5cc65790eac64e",
    33: "7c5e6c2ba9cf33fe",
    34: "7d1f551d9d0e2f6e",
    35: "51a6390fc6e34bff",
    36: "ddec2a25c7dcada2",
    37: "070d0d653e40d22f",
    38: "dbf9e523d619456a",
    39: "11b1c12b0d0dc0ee",
    40: "0ab32922a8b1c118",
}
"""Of what the messages and the calls of each protocol are made of."""


def described(name: str, hint: Any) -> str:
    """numpy writes its types in a way of its own in each version."""
    return f"{name}: {'array' if 'numpy' in str(hint) else hint}"


def test_messages_and_endpoints_change_with_the_number_of_the_protocol_only() -> None:
    """Two sides that greet each other with the same number have to understand each other."""
    fields = {wire.__name__: starmap(described, wire.__annotations__.items()) for wire in WIRE_TYPES}
    messages = [f"{name}({', '.join(of_message)})" for name, of_message in fields.items()]
    calls = [
        f"{contract.__name__}.{name}{inspect.signature(getattr(contract, name))}"
        for contract in (Generation, Environment, Reward, Reference, Critic, Training)
        for name in sorted(contract.endpoints)
    ]
    digest = sha256("\n".join(messages + calls).encode()).hexdigest()[:16]
    assert DIGESTS.get(PROTOCOL) == digest, (
        "messages or endpoints changed: raise PROTOCOL beside WIRE_TYPES, "
        f"and note DIGESTS = {{{PROTOCOL + 1}: {digest!r}}} here"
    )


def test_a_score_is_split_into_its_turns_and_what_belongs_to_none_comes_last() -> None:
    assert Score(1.5, {}, "", (0.25, 0.5, 0.25)).by_turn(3) == (0.25, 0.5, 0.75)
    assert Score(1.5, {}).by_turn(3) == (0.0, 0.0, 1.5)
    assert Score(1.5, {}, "", (1.0,)).by_turn(1) == ()
    assert Score(None, {}, "the environment failed").by_turn(3) == ()
    with pytest.raises(AssertionError, match="parts for 2 turns of an episode of 3"):
        Score(1.5, {}, "", (1.0, 0.5)).by_turn(3)
