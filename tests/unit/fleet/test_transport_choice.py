import pytest

from asyncrl.errors import ConfigError
from asyncrl.fleet.weight_transport import WorkerPlace, choose_transport
from asyncrl.lanes.host_id import HostId

A = HostId("a")
B = HostId("b")
HERE = WorkerPlace(A, "cpu")
ELSEWHERE = WorkerPlace(B, "cpu")
GPU = WorkerPlace(A, "cuda")


@pytest.mark.parametrize(
    ("named", "generator", "in_process", "chosen"),
    [
        ("auto", HERE, False, "shm"),
        ("auto", GPU, False, "shm"),
        ("auto", ELSEWHERE, False, "tcp"),
        ("auto", HERE, True, "inproc"),
        ("shm", HERE, True, "inproc"),
        ("shm", HERE, False, "shm"),
        ("tcp", HERE, False, "tcp"),
        ("tcp", HERE, True, "tcp"),
        ("file", ELSEWHERE, False, "file"),
        ("gloo", ELSEWHERE, False, "gloo"),
    ],
)
def test_transport_follows_from_places(named: str, generator: WorkerPlace, in_process: bool, chosen: str) -> None:
    choice = choose_transport(named, HERE, generator, in_process=in_process)
    assert choice.name == chosen
    assert choice.reason


def test_a_device_is_named_in_the_reason() -> None:
    assert "devices copy" in choose_transport("auto", HERE, GPU).reason
    assert "devices" not in choose_transport("auto", HERE, HERE).reason


@pytest.mark.parametrize(("other", "direct"), [("cuda:0", "cuda_ipc"), ("cuda:1", "nccl")])
def test_a_way_between_devices_is_named_and_not_chosen(other: str, direct: str) -> None:
    choice = choose_transport("auto", WorkerPlace(A, "cuda:0"), WorkerPlace(A, other))
    assert choice.name == "shm"
    assert f'"{direct}" would spare' in choice.reason


@pytest.mark.parametrize("named", ["shm", "cuda_ipc"])
def test_shared_memory_between_hosts_is_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="different hosts"):
        choose_transport(named, HERE, ELSEWHERE)


def test_one_host_has_one_name() -> None:
    assert WorkerPlace.here("cpu") == WorkerPlace.here("cpu")
    assert WorkerPlace.here("cpu").host == WorkerPlace.here("cuda").host
