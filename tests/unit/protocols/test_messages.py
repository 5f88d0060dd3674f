from dataclasses import Field, fields
from hashlib import sha256
from typing import Any

from asyncrl.protocols.messages import PROTOCOL, WIRE_TYPES

DIGESTS = {2: "14d53b9552037f10"}
"""Of what the messages of each protocol are made of. 2: as in 1, which had the number in a frame of its own."""


def described(field: "Field[Any]") -> str:
    """numpy writes its types in a way of its own in each version."""
    kind = str(field.type)
    return f"{field.name}: {'array' if 'numpy' in kind else kind}"


def test_messages_change_with_the_number_of_the_protocol_only() -> None:
    """Two sides that greet each other with the same number have to understand each other."""
    messages = [f"{wire.__name__}({', '.join(map(described, fields(wire)))})" for wire in WIRE_TYPES]
    digest = sha256("\n".join(messages).encode()).hexdigest()[:16]
    assert DIGESTS.get(PROTOCOL) == digest, (
        f"messages changed: raise PROTOCOL beside WIRE_TYPES, and note DIGESTS = {{{PROTOCOL + 1}: {digest!r}}} here"
    )
