"""Compares the config of a resumed run with the one it began with, and refuses changes of what the run learns."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from asyncrl.config.named_files import without_paths
from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm_config import CHANGEABLE, Section
from asyncrl.config.sections.secret import Secret
from asyncrl.config.sources.keys import all_keys
from asyncrl.config.sources.load_config import read
from asyncrl.config.toml_writer import value_text
from asyncrl.errors import ConfigError

EXACT_CODECS = {"dense", "sparse"}
"""Values of `weights.codec` with which generation gets the trainer's weights, unrounded."""
NO_FILES: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True, slots=True)
class Change:
    """One key whose value differs. why_not: reason for a refusal, "" when the key may change."""

    key: str
    old: Any
    new: Any
    why_not: str = ""

    def __str__(self) -> str:
        old, new = ("none" if value is None else value_text(value) for value in (self.old, self.new))
        return f"{self.key}: {old} -> {new}" + (f"  ({self.why_not})" if self.why_not else "")


def compare(old: Config, new: Config) -> list[Change]:
    """Returns the keys whose values differ, in the order of the config."""
    pairs = ((name, attrgetter(name)(old), attrgetter(name)(new)) for name in all_keys())
    return [
        Change(name, was, now, "" if _same_weights(name, was, now) else _why_not(name, new))
        for name, was, now in pairs
        if _plain(was) != _plain(now)
    ]


def _same_weights(name: str, old: Any, new: Any) -> bool:
    """Returns whether only the encoding of the same weights changes."""
    return name == "weights.codec" and {old, new} <= EXACT_CODECS


def _why_not(name: str, new: Config) -> str:
    if name == "steps" and new.training.schedule != "constant":
        return f"the {new.training.schedule} learning rate depends on it"
    return "" if may_change(name) else "it changes what the run learns"


def may_change(name: str) -> bool:
    """Returns whether the schema marks a key, or its section, as MayChange."""
    section, _, key = name.partition(".")
    outer = Config.model_fields.get(section)
    inner = getattr(outer and outer.annotation, "model_fields", {}).get(key)
    return any(CHANGEABLE in field.metadata for field in (outer, inner) if field is not None)


def check_resume(
    run_dir: Path, new: Config, accept: bool, files: Mapping[str, Sequence[str]] = NO_FILES, same: Collection[str] = ()
) -> list[str]:
    """Returns the differences from `RUN_DIR/config.toml`, and of files; unless `accept`, raises ConfigError for those
    that are not allowed. files: by config key, what changed in them. same: keys whose files hold what they
    held before, perhaps elsewhere."""
    changes = [
        replace(change, why_not="") if change.key in same and _differ_in_paths(change) else change
        for change in compare(read(run_dir / "config.toml"), new)
    ]
    refused = [str(change) for change in changes if change.why_not]
    refused += [text for key, texts in files.items() if _why_not(key, new) for text in texts]
    if refused and not accept:
        listed = "".join(f"  {each}\n" for each in refused)
        raise ConfigError(
            f"the run in {run_dir} began with other values or files:\n{listed}"
            "write back the old ones, start anew with another --run-dir, or take the change over with --accept-changes"
        )
    return [*map(str, changes), *(text for texts in files.values() for text in texts)]


def _differ_in_paths(change: Change) -> bool:
    """Returns whether nothing but paths of files makes two values differ."""
    old, new = (without_paths(change.key, _plain(value)) for value in (change.old, change.new))
    return bool(old == new)


def _plain(value: Any) -> Any:
    """Returns a value with sections as mappings and secrets as ***, as a file has them: another key is no change."""
    match value:
        case Secret():
            return str(value)
        case Section():
            return _plain(dict(value))
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [*map(_plain, value)]
    return value
