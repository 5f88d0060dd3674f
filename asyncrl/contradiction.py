"""What a rule finds in a config whose values do not fit together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contradiction:
    """keys: the keys that do not fit; text: why not, and what to write instead."""

    keys: tuple[str, ...]
    text: str
