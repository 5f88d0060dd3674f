from pathlib import Path

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.protocols.rank_layout import Layout


def test_a_specification_survives_its_line_of_json() -> None:
    config = Config(model=ModelConfig(name="m"), task=TaskConfig(prompts="p"), seed=7)
    facts = RunFacts(
        "feedbeef", Path("/run"), Path("/model"), 2, "arena", config, Path("/checkpoint"), ("public", "secret")
    )
    spec = WorkerSpec(
        service="training",
        replica=0,
        rank=3,
        layout=Layout(pp=2, tp=2, dp=2),
        instance="training0.3-2-0a0b0c0d",
        implementation="asyncrl.services.training:TrainingService",
        addresses=Addresses("ipc:///a", "ipc:///b", "ipc:///c"),
        facts=facts,
        options={"depth": [1, 2]},
    )
    line = spec.to_json()
    assert "\n" not in line
    assert WorkerSpec.from_json(line) == spec
