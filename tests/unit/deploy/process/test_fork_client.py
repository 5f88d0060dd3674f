"""The processes that workers are forked from, as `asyncrl run` begins them before it has read its config."""

import os
from collections.abc import Mapping
from typing import Any

import pytest

from asyncrl.config.schema import Config, FleetConfig, ModelConfig, TaskConfig
from asyncrl.deploy.process import fork_client
from asyncrl.deploy.process.fork_client import Forks, forks_of, worker_environment


class Begun(Forks):
    """Starts no process, and counts how often processes were begun and ended."""

    begun = ended = 0

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> None:
        self.ended += 1


def config(fleet: Mapping[str, Any]) -> Config:
    return Config(model=ModelConfig(name="m"), task=TaskConfig(prompts="p"), fleet=FleetConfig.model_validate(fleet))


def test_early_processes_serve_the_default_config() -> None:
    early = Begun(worker_environment(os.environ))
    with forks_of(config({"start_deadline": 7}), early, lambda text: None) as forks:
        assert forks is early
        assert early.deadline == 7
    assert early.ended == 0


@pytest.mark.parametrize("fleet", [{"threads": 2}, {"wire": "tcp"}])
def test_early_processes_with_another_environment_are_ended_and_begun_anew(
    fleet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "Forks", Begun)
    early = Begun(worker_environment(os.environ))
    with forks_of(config(fleet), early) as forks:
        assert isinstance(forks, Begun)
        assert forks is not early
        assert (early.ended, forks.begun) == (1, 1)
    assert forks.ended == 1


@pytest.mark.parametrize("fleet", [{"start": "spawn"}, {"wire": "inproc"}])
def test_early_processes_are_ended_where_no_worker_is_forked(fleet: dict[str, Any]) -> None:
    early = Begun(worker_environment(os.environ))
    with forks_of(config(fleet), early) as forks:
        assert forks is None
        assert early.ended == 1


@pytest.mark.parametrize("fleet", [{"start": "spawn"}, {"wire": "inproc"}])
def test_nothing_is_begun_for_workers_that_are_not_forked(fleet: dict[str, Any]) -> None:
    with forks_of(config(fleet)) as forks:
        assert forks is None
