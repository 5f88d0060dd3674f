"""Reads the dict of `asyncrl.RLTrainer`: every key is checked, and stands for keys of a config."""

from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.config.problems import Problem, refuse
from asyncrl.config.schema import Config
from asyncrl.config.sources.keys import closest
from asyncrl.errors import ConfigError

PLACEMENTS = ("spread", "pack")
"""Places of environments: spread over as many acting workers, or packed into one, over as many of its children."""
PLAIN = {
    "algorithm": "acting.algorithm",
    "env": "acting.env",
    "env_options": "acting.options",
    "learning_rate": "training.learning_rate",
    "gamma": "acting.gamma",
    "seed": "seed",
    "name": "name",
}
MEANT = {
    **dict.fromkeys(("lr", "alpha"), "learning_rate"),
    **dict.fromkeys(("environment_name", "env_id", "env_name"), "env"),
    **dict.fromkeys(("num_workers", "n_envs"), "distributed.num_workers"),
    "hidden_size": "policy.hidden_size",
    "activation": "policy.activation",
    "env_config": "env_options",
}
"""Keys by names that other libraries have for them."""
TABLES = {"policy": ("hidden_size", "activation"), "distributed": ("num_workers", "placement_strategy")}
SECTIONS = tuple(
    name
    for name, field in Config.model_fields.items()
    if hasattr(field.annotation, "model_fields") and name not in PLAIN
)
"""Sections of a config, which may stand beside these keys."""


def trainer_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config, by dotted key or section. Raises ConfigError with every key that does not exist,
    and the closest one that does."""
    if not isinstance(given, Mapping):
        raise ConfigError(f'RLTrainer: write a dict, {{"algorithm": "PPO", "env": "CartPole-v1"}}, not {given!r:.100}')
    problems = [*_unknown("", given, (*PLAIN, *TABLES, *SECTIONS))]
    for table, keys in TABLES.items():
        inner = given.get(table, {})
        if isinstance(inner, Mapping):
            problems += _unknown(f"{table}.", inner, keys)
        else:
            problems.append(Problem(table, "", f"must be a table with {' and '.join(keys)}, not {inner!r:.100}"))
    problems += [
        Problem(name, "", f"must be a table of its keys, not {given[name]!r:.100}")
        for name in SECTIONS
        if name in given and not isinstance(given[name], Mapping)
    ]
    problems += [Problem("env", "", "write the name of an environment")] if not given.get("env") else []
    if not problems:
        problems += _placement_problems(given.get("distributed", {})) + _repeated(given)
    refuse(problems)
    sections: dict[str, Any] = {name: dict(given[name]) for name in SECTIONS if name in given}
    return sections | {key: value for key, (_, value) in _meanings(given).items()}


def _meanings(given: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Returns by key of the config what was written for it outside of sections: where, and the value."""
    found = {key: (name, given[name]) for name, key in PLAIN.items() if name in given}
    if isinstance(algorithm := given.get("algorithm"), str):
        found["acting.algorithm"] = ("algorithm", algorithm.lower())
    found |= {f"acting.{key}": (f"policy.{key}", value) for key, value in given.get("policy", {}).items()}
    if (workers := given.get("distributed", {}).get("num_workers")) is not None:
        is_packed = given["distributed"].get("placement_strategy", PLACEMENTS[0]) == "pack"
        key = "acting.children" if is_packed else "generation.replicas"
        found[key] = ("distributed.num_workers", workers)
    return found


def _repeated(given: Mapping[str, Any]) -> list[Problem]:
    """Returns a problem for each key of a section that was written outside of it too."""
    keys = ((key, where, *key.rpartition(".")[::2]) for key, (where, _) in _meanings(given).items())
    return [
        Problem(where, "", f"{key} says the same and is written too: write one of them")
        for key, where, section, name in keys
        if section and name in given.get(section, {})
    ]


def _placement_problems(distributed: Mapping[str, Any]) -> list[Problem]:
    strategy = distributed.get("placement_strategy", PLACEMENTS[0])
    if strategy in PLACEMENTS:
        return []
    near = closest(str(strategy), PLACEMENTS)
    meant = f"did you mean {near}? " if near else ""
    return [Problem("distributed.placement_strategy", "", f"there is no {strategy!r}; {meant}write spread or pack")]


def _unknown(prefix: str, given: Mapping[str, Any], known: Iterable[str]) -> list[Problem]:
    """Returns a problem for each key that does not exist."""
    names = list(known)
    found = []
    for key in given:
        if key not in names:
            near = MEANT.get(str(key)) or closest(str(key), names)
            listed = [name for name in names if name not in SECTIONS]
            meant = f"did you mean {prefix}{near}?" if near else f"there are {', '.join(listed)}"
            text = f"there is no such key; {meant}"
            found.append(Problem(f"{prefix}{key}", "", text))
    return found
