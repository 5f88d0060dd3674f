"""docs/troubleshooting.md: what it quotes is what the code says, its metrics and keys exist, no trap is forgotten."""

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from asyncrl.config.sources import load
from asyncrl.config.sources.keys import all_keys
from asyncrl.telemetry.jsonl import FURTHER_METRICS, METRICS

ROOT = Path(__file__).parents[2]
ALGORITHM = (ROOT / "docs/troubleshooting.md").read_text()
SYMPTOMS = [line.split(" | ")[0] for line in ALGORITHM.splitlines()]
QUOTED = sorted({quote for symptom in SYMPTOMS for quote in re.findall(r'"([^"]+)"', symptom)})
ROWS = [line.strip("|").split(" | ") for line in ALGORITHM.splitlines() if line.startswith("| ")][1:]
CODE = sorted(set(re.findall(r"`([^`]+)`", " ".join(cell for row in ROWS for cell in row[:3]))))
OTHERS = {"asyncrl", "logs/", "/dev/shm", "metrics.jsonl", "nvidia-smi", "asyncio.timeout"}
"""First words of what is neither: commands, files, folders."""

METRIC_NAMES = [code for code in CODE if re.fullmatch(r"[a-z_]+/[a-z0-9_/<> ]+", code)]
KEYED = re.compile(r"[a-z_]+\.[a-z0-9_]+( = .+)?|finish = .+")
SETTINGS = [code for code in CODE if KEYED.fullmatch(code) and code not in OTHERS]
UNSEEN = {
    "end_is_padding": "no id is compared with another",
    "invented_end": "nothing is appended",
    "micro_batches": "results do not depend on them",
    "masked_denominators": "denominators are fixed before",
    "equal_rewards": "they give exactly nothing",
    "which_deviation": "it is documented, and the same everywhere",
    "dropout": "it is always off",
    "packing": "rows do not see each other",
    "padded_vocabulary": "such ids have probability zero",
}
"""Traps that no user can meet by a setting, and why."""

NEEDED = {
    'algorithm.correction = "mask"': ("--algorithm.old_logprobs", "recomputed"),
    'algorithm.correction_level = "sequence"': ("--algorithm.old_logprobs", "recomputed"),
    'algorithm.rejection = "geometric"': ("--algorithm.rejection_low", "0.9", "--algorithm.rejection_high", "1.1"),
    'algorithm.kl_in = "reward"': ("--algorithm.kl_estimator", "k1"),
    "algorithm.gae_lambda = 1": ("--algorithm.preset", "ppo"),
    "model.float32_head = true": ("--model.dtype", "bfloat16"),
}
"""What a setting makes no sense without."""

SOURCES = [path for folder in ("asyncrl", "services", "deploy") for path in (ROOT / folder).rglob("*.py")]
SOURCES.append(ROOT / "asyncrl/config/sources/aliases.toml")


@pytest.fixture(scope="module")
def said() -> str:
    """All sources, with strings that go on in the next line joined and what is filled in left open."""
    text = re.sub(r'"\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES))
    return re.sub(r"\{[^{}\n]*\}", "N", text)


@pytest.mark.parametrize("quote", QUOTED)
def test_quoted_messages_are_in_the_source(quote: str, said: str) -> None:
    assert quote in said or quote.removeprefix("/dev/shm ") in said


def test_every_row_has_a_symptom_a_place_to_look_a_remedy_and_a_trap() -> None:
    assert len(ROWS) > 45
    assert [row for row in ROWS if len(row) != 4 or not all(cell.strip() for cell in row)] == []
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_named_metrics_are_written(name: str, unknown_metrics: Callable[[Mapping[str, object]], list[str]]) -> None:
    assert name in FURTHER_METRICS or unknown_metrics({name: 0.0}) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_named_keys_accept_the_named_values(setting: str) -> None:
    key, _, value = setting.partition(" = ")
    assert key in all_keys()
    refused = any(f"`{setting}` is refused" in row[0] for row in ROWS)
    if value and not refused:
        assert tomllib.loads(f"value = {value}")
        flags = (f"--{key}", value.strip('"'), *NEEDED.get(setting, ()))
        assert load("quickstart", flags, {})


def test_other_quoted_words_are_commands_files_or_terms() -> None:
    rest = [code for code in CODE if code not in (*METRIC_NAMES, *SETTINGS, *METRICS) and code.split()[0] not in OTHERS]
    assert [code for code in rest if not re.fullmatch(r"[a-z_ ]+", code)] == []


def test_every_trap_that_a_user_can_meet_has_a_row() -> None:
    told = {row[3].strip(" -`") for row in ROWS} - {""}
    traps = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/traps.md").read_text(), re.MULTILINE))
    assert told | set(UNSEEN) == traps
    assert not told & set(UNSEEN)
