"""Every key of the reference can be set: some experiment takes a value of it that is not its default."""

from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.config.sources import load
from asyncrl.config.sources.keys import Key, all_keys, keys_with_tables, table_keys
from asyncrl.errors import ConfigError

POOL = {"pools": {"x": {"devices": ["cpu"]}}}
COSTS = {"algorithm.preset": "safe_rlhf", "cost.functions": ["exact_match"], "cost.limit": 0.5}
CONTEXTS: tuple[dict[str, Any], ...] = (
    {},
    POOL | {"evaluate.prompts": ""},
    POOL | COSTS | {"evaluate.prompts": ""},
    COSTS,
    {"algorithm.preset": "ppo"},
    {"algorithm.kl": 0.1, "algorithm.kl_in": "loss", "training.router_replay": True},
    {"reward.model": "m"},
    {"cost.model": "m", "algorithm.preset": "safe_rlhf", "cost.limit": 0.5},
    {"algorithm.loss": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_high": 0.3},
    {"algorithm.rejection_low": 0.9, "algorithm.rejection_high": 1.11, "staleness.limit": 2},
    {"task.pretrain": "texts.jsonl"},
    {"algorithm.pretrain_coefficient": 0.5},
    {"algorithm.old_logprobs": "recomputed", "algorithm.correction": "cap", "staleness.limit": 2},
    {"evaluate.temperature": 1.0},
    {"generation.colocate": "training", "staleness.limit": 0, "training.layout": {"pp": 2}},
    {"generation.colocate": "training", "staleness.limit": 0, "training.layout": {"tp": 2}},
    {"training.engine": "deepspeed", "training.layout": {"dp": 2}},
    {"fleet.listen": "127.0.0.1:0", "fleet.joined": {"generation": 1}, "fleet.wire": "tcp"},
    {"reward.deadline": 0.05},
)
"""Values of other keys beside which a key is tried, each over those of the quickstart."""
EXAMPLES: dict[str, Any] = {
    "pools": POOL["pools"],
    "task.columns": {"prompt": "question"},
    "task.prompts.columns": {"prompt": "question"},
    "acting.hidden_size": [32],
    "feedback.host": "127.0.0.2",
    "feedback.key": "abcdefgh1234",
    "training.optimizer_options": {"eps": 1e-6},
    "training.betas": [0.8, 0.9],
    "algorithm.gate_temperatures": [1.0, 2.0],
    "evaluate.sets": {"x": {"prompts": "texts.jsonl"}},
    "telemetry.otlp": "http://127.0.0.1:4318",
    "telemetry.prometheus": "127.0.0.1:9400",
    "fleet.listen": "tcp://127.0.0.1:9999",
    "fleet.joined": {"generation": 1},
    "fleet.ray_resources": {"generation": {"CPU": 2}},
}
"""Values that no type tells."""


def values(key: Key) -> Iterator[Any]:
    """Yields values that the type of a key allows, and that are not its default."""
    if key.name in EXAMPLES:
        yield EXAMPLES[key.name]
        return
    words = [word for word in key.type.removeprefix("list of ").split(" | ") if word != "table"]
    by_kind: dict[str, list[Any]] = {
        "boolean": [not key.default],
        "integer": [2, 3, 1, 100],
        "number": [0.5, 0.1, 2.0],
        "string": [*words, "x", "2026-11-28"],
        "array": [[word] for word in (*words, "x")],
        "object": [{inner.name.rpartition(".")[2]: value} for inner in inner_keys(key) for value in values(inner)],
    }
    yield from (value for kind in ("", *key.kinds) for value in by_kind.get(kind, words) if value != key.default)
    yield {"a": 1}


def inner_keys(key: Key) -> list[Key]:
    return [inner for inner in table_keys().values() if inner.name.rpartition(".")[0] == key.name]


def refusals(key: Key) -> Iterator[str]:
    """Yields why each value is refused beside each context, and "" for one that is not."""
    table, _, last = key.name.rpartition(".")
    outer = table if key.name in table_keys() else ""
    is_list = outer in all_keys() and "array" in all_keys()[outer].kinds
    for context in ({"acting.env": "CartPole-v1"},) if key.name.startswith("acting.") else CONTEXTS:
        for value in values(key):
            entry = {"use": "exact_match", last: value} if is_list else {last: value}
            given = {outer: [entry] if is_list else entry} if outer else {key.name: value}
            target = "cartpole" if key.name.startswith("acting.") or key.name == "evaluate.episodes" else "quickstart"
            try:
                load(target, (), {}, {**({} if target == "cartpole" else context), **given})
            except ConfigError as error:
                yield f"{value!r}: {error}"
            else:
                yield ""


TRIED = [key for key in keys_with_tables() if ".NAME" not in key.name]


@pytest.mark.parametrize("key", TRIED, ids=lambda key: key.name)
def test_some_experiment_may_set_the_key(key: Key) -> None:
    assert "" in refusals(key), "\n".join(refusals(key))
