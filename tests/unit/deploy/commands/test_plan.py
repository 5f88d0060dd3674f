"""`asyncrl plan` says where workers run and what they take, with the numbers of doctor, and what does not fit."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.deploy import cli
from asyncrl.deploy.checks.memory_needs import (
    GPU_PROCESS_BYTES,
    budget_problems,
    memory_problems,
    needs,
    planned_workers,
    unchecked_memory,
)
from asyncrl.engines.models.model_shape import PACKAGED
from asyncrl.lanes.host_id import HostId

SMOLLM2 = PACKAGED["pypi:smollm2"]
POOLS = """
[pools.gpus]
devices = ["cuda:0", "cuda:1"]
memory_gb = {}
[model]
name = "pypi:smollm2"
[task]
prompts = "p"
[training]
pool = "gpus"
[generation]
pool = "gpus"
replicas = 2
[reward]
functions = ["exact_match"]
"""


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices that this machine lacks, which is not asked."""
    names: list[str] = []

    def mistakes(devices: Mapping[str, str]) -> list[Problem]:
        return [Problem(key, "", f'"{device}" is not here') for key, device in devices.items() if device in names]

    monkeypatch.setattr("asyncrl.deploy.preflight.device_mistakes", mistakes)
    return names


def pooled(**sections: Any) -> Config:
    pools = {"gpus": {"devices": ["cuda:0", "cuda:1"]}}
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "pools": pools, "training": {"pool": "gpus"}}
    return Config.model_validate(values | {"generation": {"pool": "gpus", "replicas": 2}} | sections)


def test_every_worker_is_planned_on_its_device_and_parts_add_up_to_what_doctor_says() -> None:
    workers = list(planned_workers(pooled(), SMOLLM2))
    assert [(each.name, each.device) for each in workers] == [
        ("generation0.0", "cuda:1"),
        ("generation1.0", "cuda:0"),
        ("training0.0", "cuda:0"),
        ("reward0.0", "cpu"),
        ("copies for checkpoints", "cpu"),
    ]
    assert {each.domain for each in workers} == {HostId.here().fault_domain}
    for need in needs(pooled(), SMOLLM2):
        planned = [each for each in workers if each.need == need]
        assert sum(each.bytes for each in planned) == need.bytes
        assert not need.parts or sum(need.parts.values()) * len(planned) == need.bytes


def test_ranks_of_the_trainer_are_planned_one_by_one() -> None:
    ranks = pooled(training={"pool": "gpus", "layout": {"dp": 2}})
    names = [(each.name, each.device) for each in planned_workers(ranks, SMOLLM2) if each.need.name == "training"]
    assert names == [("training0.0", "cuda:0"), ("training0.1", "cuda:1")]


def test_the_memory_of_gpus_is_no_memory_of_this_host() -> None:
    assert not list(memory_problems(pooled(), SMOLLM2, 2**30))
    on_cpu = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}})
    assert ["of memory are available" in str(each) for each in memory_problems(on_cpu, SMOLLM2, 2**30)] == [True]


@pytest.mark.usefixtures("absent")
def test_plan_prints_workers_and_refuses_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(POOLS.format(40))
    assert cli.main(["plan", str(path)]) == 0
    said = capsys.readouterr().out
    for part in ("training0.0", "gradients 513 MB", "optimizer 1.0 GB", f"machine of {HostId.here().name}", "/dev/shm"):
        assert part in said
    path.write_text(POOLS.format(2))
    assert cli.main(["plan", str(path)]) == 1
    said = capsys.readouterr().out
    assert "does not fit: pools.gpus.memory_gb, generation.pool, training.pool: cuda:0 of" in said
    assert "pool 'gpus' allows 1.9 GB; training0.0 takes 2.5 GB of that" in said, "CUDA's own memory counts"


def test_columns_are_apart_and_every_line_has_a_subject(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "quickstart"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"prompt tokens: \d+ in the mean and at most \d+, by \d+ rows", lines[1])
    assert re.match(r"worker +host +device +fails with +bytes", lines[2])
    (copies,) = (line for line in lines if line.startswith("copies for checkpoints"))
    columns = [lines[2].index(name) for name in ("host", "device", "fails with", "bytes")]
    assert [copies[place - 2 : place].strip() for place in columns] == [""] * 4
    assert [copies[place] != " " for place in columns] == [True] * 4


def test_a_budget_that_is_probably_too_small_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    on_cpu = POOLS.replace('["cuda:0", "cuda:1"]', '["cpu"]')
    path.write_text(on_cpu.format(5) + '[pools.spare]\ndevices = ["cuda:7"]\n')
    assert cli.main(["plan", str(path)]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"note: pools\.gpus\.memory_gb, .* probably needs [\d.]+ GB for generation0\.0, .*allows 4\.7 GB", said
    )
    assert "note: pools: no service runs in pool 'spare'" in said
    path.write_text(on_cpu.format(500))
    assert cli.main(["plan", str(path)]) == 0
    assert "memory_gb" not in capsys.readouterr().out


def test_a_device_that_is_not_here_is_noted(
    absent: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent.append("cuda:99")
    path = tmp_path / "mine.toml"
    path.write_text(POOLS.format(0).replace("cuda:1", "cuda:99"))
    assert cli.main(["plan", str(path)]) == 0, "the plan may be for another machine"
    said = capsys.readouterr().out
    assert 'note: pools.gpus.devices[1], training.pool, generation.pool: "cuda:99" ' in said
    assert "note: pools.gpus.memory_gb, " in said, "nobody said how much memory the devices have"


HOSTS = {"devices": ["cuda:0", "cuda:1", "cuda:2"], "hosts": ["n1", "n2"]}
JOINED = {"wire": "tcp", "listen": "tcp://127.0.0.1:7000", "joined": {"generation": 2, "training": 1}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (pooled(), [r"^pools\.gpus\.memory_gb, .*cuda:0 of \S+ and cuda:1 of .* as pools\.gpus\.memory_gb"]),
        (pooled(pools={"gpus": {"devices": ["cuda:0", "cuda:1"], "memory_gb": 40}}), []),
        (pooled(training={"device": "cuda"}), ["cuda:0 of .*: name a pool with memory_gb", "pools.gpus.memory_gb"]),
        (pooled(pools={"gpus": {"devices": ["cpu"]}}), ["cpu of .* as pools.gpus.memory_gb"]),
        (pooled(pools={"gpus": HOSTS}, fleet=JOINED), ["pools.gpus.memory_gb", "no key says how much such a host has"]),
        (pooled(pools={"gpus": HOSTS | {"memory_gb": 80}}, fleet=JOINED), ["no key says how much such a host has"]),
        (Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}}), []),
    ],
)
def test_memory_that_nobody_names_is_said_to_be_unchecked(config: Config, said: list[str]) -> None:
    found = list(map(str, unchecked_memory(config, SMOLLM2)))
    assert len(found) == len(said)
    assert all(any(re.search(each, text) for text in found) for each in said), found
    assert all("was not checked, where services probably need up to" in text for text in found)


def test_processes_that_share_out_a_replica_of_vllm_share_its_bytes() -> None:
    """A replica on two GPUs takes half of weights and cache on each."""
    generation = {"pool": "gpus", "engine": "vllm", "layout_tp": 2, "vllm": {"kv_cache_memory_bytes": 10**9}}
    needed = SMOLLM2.parameters * 4 + 2 * 10**9 + 3 * GPU_PROCESS_BYTES
    for memory, problems in ((needed / 2 + 10**6, 0), (needed / 2 - 10**6, 2)):
        gpus = {"devices": ["cuda:0", "cuda:1"], "memory_gb": memory / 10**9}
        config = pooled(pools={"gpus": gpus}, training={"device": "cpu"}, generation=generation)
        assert sum(not each.is_warning for each in budget_problems(config, SMOLLM2)) == problems
