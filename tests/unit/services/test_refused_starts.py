"""Starts of services that are refused before anything is loaded, by the key that is to be changed."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.services.critic import CriticService
from asyncrl.services.reference import ReferenceService
from asyncrl.services.reward_model import RewardModelService
from asyncrl.services.training import TrainingService
from tests.unit.services.conftest import Serve


@pytest.mark.parametrize(
    ("service", "make", "sections"),
    [
        ("critic", CriticService, {"algorithm": {"preset": "ppo"}}),
        ("reference", ReferenceService, {"algorithm": {"kl": 0.1}}),
        ("reward", RewardModelService, {"reward": {"model": "a folder"}}),
        ("training", TrainingService, {}),
    ],
)
async def test_a_device_that_is_not_there_is_refused_by_its_key(
    service: str, make: Any, sections: dict[str, Any], serve: Serve, folder: Path
) -> None:
    plain = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, **sections}
    plain[service] = {**sections.get(service, {}), "device": "cuda:99"}
    parts = {"model_dir": folder, "options": {"model": str(folder)}}
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=rf'^{service}\.device = "cuda:99" cannot be used')):
        async with serve(make, service, Config.model_validate(plain), **parts):
            pass
