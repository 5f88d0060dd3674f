"""Secrets of a config: shown by nothing that writes it, known to those who need them, and kept for a resume."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.secret import (
    FILE,
    WITHHELD,
    Secret,
    keep_secrets,
    revealed,
    secret_paths,
    secrets_of,
    veiled,
    with_kept_secrets,
    without_secrets,
)
from asyncrl.config.sources import load
from asyncrl.config.sources.load_config import read
from asyncrl.config.sources.resume import compare
from asyncrl.config.toml_writer import dump, value_text
from asyncrl.errors import ConfigError
from asyncrl.fleet.worker.worker_spec import NOT_BOUND, RunFacts, WorkerSpec
from asyncrl.protocols.rank_layout import Layout

SECRETS = {
    "feedback.key": "page-of-raters",
    "environment.options.variables.OPENAI_API_KEY": "sk-agent-1",
    "environment.options.env.PGUSER": "of-the-table-1",
    "environment.options.headers.Authorization": "Bearer of-a-header",
    "environment.options.api_key": "sk-environment",
    "environment.options.inner.password": "deep-password",
    "acting.options.access_token": "token-of-acting",
    "generation.vllm.hf_token": "hf_of-the-engine",
    "task.options.token": "hf_of-the-rows",
    "evaluate.options.client-secret": "secret-of-evaluation",
}
FUNCTIONS = [{"use": "numeric", "options": {"apikey": "sk-in-a-list", "column": "answer"}}]
ALL = (*SECRETS.values(), "sk-in-a-list", "secret-of-a-pair")
SHOWN = {"environment.options.column": "tests", "generation.vllm.eos_token": "<end>", "task.options.max_tokens": 7}


def config(**more: Any) -> Config:
    values = {"model.name": "tiny", "task.prompts": "addition", "reward.functions": FUNCTIONS, **SECRETS, **SHOWN}
    tree: dict[str, Any] = {}
    for key, value in {**values, **more}.items():
        section, name, *inner = key.split(".")
        table = tree.setdefault(section, {})
        for step in ([name, *inner])[:-1]:
            table = table.setdefault(step, {})
        table[[name, *inner][-1]] = value
    return Config.model_validate(tree)


@dataclass
class Holder:
    key: Secret


def spec(made: Config) -> WorkerSpec:
    facts = RunFacts(
        "f00d", Path("/runs/one"), Path("/model"), 1, "arena", made, curve=("public-0", "secret-of-a-pair")
    )
    options = {"host": "127.0.0.1", "key": "page-of-raters"}
    return WorkerSpec("reward", 0, 0, Layout(), "reward0.0-1-1", "module:Class", NOT_BOUND, facts, options)


WRITERS: dict[str, Callable[[Config], str]] = {
    "toml": dump,
    "repr": repr,
    "str": str,
    "json": lambda made: json.dumps(made.model_dump(mode="json")),
    "python": lambda made: str(made.model_dump()),
    "json text": lambda made: made.model_dump_json(),
    "table": lambda made: value_text(made.environment.options),
    "list": lambda made: value_text(made.reward.functions),
    "format": lambda made: f"{made.feedback.key} {made.environment.options} {made.reward.functions!r}",
    "asdict": lambda made: str(asdict(Holder(made.feedback.key))),
    "recorded": lambda made: spec(made).without_secrets(),
    "changes": lambda made: " ".join(map(str, compare(config(), config(**{"staleness.limit": 3})))),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_shows_a_secret(name: str) -> None:
    text = WRITERS[name](config())
    assert [each for each in ALL if each in text] == []


def test_what_is_no_secret_is_shown() -> None:
    text = dump(config())
    assert WITHHELD in text
    assert all(str(each) in text for each in SHOWN.values())
    plain = {"key": 3, "tokens": ["a"], "stop_token": "</s>", "key_variable": "OPENAI_API_KEY", "token": ""}
    assert veiled(plain) == plain


def test_workers_get_the_secrets() -> None:
    there = WorkerSpec.from_json(spec(config()).to_json()).facts.config
    assert there == config()
    assert {each.value for _, each in secrets_of(there)} == set(ALL[:-1])
    assert revealed(there.environment.options)["variables"] == {"OPENAI_API_KEY": "sk-agent-1"}


def test_a_wrong_secret_is_not_in_its_error() -> None:
    for wrong in ("short!", "0123456\n", "k" * 129, 77777777):
        with pytest.raises(ConfigError, match=r"feedback\.key") as error:
            load("quickstart", environ={}, values={"feedback.key": wrong})
        assert str(wrong) not in str(error.value)


def test_a_run_goes_on_with_the_secrets_that_its_directory_keeps(tmp_path: Path) -> None:
    keep_secrets(config(), tmp_path)
    (tmp_path / "config.toml").write_text(dump(config()))
    assert stat.S_IMODE(os.stat(tmp_path / FILE).st_mode) == 0o600
    found = read(tmp_path / "config.toml")
    assert compare(found, config()) == []
    assert with_kept_secrets(found, tmp_path) == config()
    keep_secrets(Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "addition"}}), tmp_path)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("kept", [None, "[]", "damaged", '{"feedback/key": 7}'])
def test_a_copy_without_its_secrets_names_what_to_give_again(tmp_path: Path, kept: str | None) -> None:
    (tmp_path / "config.toml").write_text(dump(config()))
    if kept is not None:
        (tmp_path / FILE).write_text(kept)
    with pytest.raises(ConfigError, match=r"feedback\.key.*give it again"):
        with_kept_secrets(read(tmp_path / "config.toml"), tmp_path)


def test_a_command_is_shown_without_secrets() -> None:
    command = "asyncrl run x --feedback.key=page-of-raters --environment.options.api_key sk-environment --steps 3"
    shown = without_secrets(command, config())
    assert shown == f"asyncrl run x --feedback.key={WITHHELD} --environment.options.api_key {WITHHELD} --steps 3"


def test_paths_of_secrets_are_known_by_their_keys() -> None:
    made = config(
        **{"fleet.join_keys": "keys", "telemetry.prometheus_token": "/etc/scrape", "telemetry.prometheus": ""}
    )
    assert sorted(secret_paths(made)) == ["/etc/scrape", "keys"]
