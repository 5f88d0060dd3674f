"""Fixtures that several files of system tests share."""

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from asyncrl.config.sources import load
from asyncrl.engines.models.model_preparation import prepare

PREPARATION = 180.0
"""Seconds that making the quickstart's model may take."""


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the quickstart's model, made once for all processes in which tests run side by side."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    target = shared / "quickstart-model"
    with (shared / "quickstart-model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            asyncio.run(prepare(load("quickstart").config, target, print, PREPARATION))
    return target
