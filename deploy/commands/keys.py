"""asyncrl keys: every config key with its type, default and meaning."""

import argparse
import json
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.settings.keys import Key


def main(arguments: list[str]) -> int:
    from asyncrl.errors import ConfigError
    from asyncrl.settings.keys import advice, all_keys, translate

    parser = argparse.ArgumentParser("asyncrl keys", description=__doc__)
    parser.add_argument("words", nargs="*", help="show only keys that contain one of these; TRL's and verl's are known")
    words: list[str] = parser.parse_args(arguments).words
    ours = [translated[0] or word if (translated := translate(word)) else word for word in words]
    found = [key for key in all_keys().values() if not words or any(word in key.name for word in ours)]
    if not found:
        raise ConfigError("; ".join(f"{word}: there is no such key, {advice(word)}" for word in words))
    for key in found:
        print(described(key))
    return 0


def described(key: "Key") -> str:
    shown = "none" if key.default is None else json.dumps(key.default, ensure_ascii=False)
    default = "required" if key.required else f"default {shown}"
    doc = textwrap.indent(textwrap.fill(key.doc, 100), "    ")
    return f"{key.name}  ({key.type}; {default})" + (f"\n{doc}" if doc else "")
