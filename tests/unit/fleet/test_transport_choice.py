import pytest

from asyncrl.errors import ConfigError
from asyncrl.fleet.weight_transport import choose_transport


@pytest.mark.parametrize(
    ("named", "device", "same_host", "in_process", "chosen"),
    [
        ("auto", "cpu", True, False, "shm"),
        ("auto", "cuda", True, False, "shm"),
        ("auto", "cpu", False, False, "tcp"),
        ("auto", "cpu", True, True, "inproc"),
        ("shm", "cpu", True, True, "inproc"),
        ("shm", "cpu", True, False, "shm"),
        ("tcp", "cpu", True, False, "tcp"),
        ("tcp", "cpu", True, True, "tcp"),
        ("file", "cpu", False, False, "file"),
        ("gloo", "cpu", False, False, "gloo"),
    ],
)
def test_transport_follows_from_places(named: str, device: str, same_host: bool, in_process: bool, chosen: str) -> None:
    choice = choose_transport(named, ("cpu", device), same_host=same_host, in_process=in_process)
    assert choice.name == chosen
    assert ("devices copy" in choice.reason) == (device == "cuda")


@pytest.mark.parametrize(("other", "direct"), [("cuda:0", "cuda_ipc"), ("cuda:1", "nccl")])
def test_a_way_between_devices_is_named_and_not_chosen(other: str, direct: str) -> None:
    choice = choose_transport("auto", ("cuda:0", other), same_host=True)
    assert choice.name == "shm"
    assert f'"{direct}" would spare' in choice.reason


@pytest.mark.parametrize("named", ["shm", "cuda_ipc"])
def test_shared_memory_between_hosts_is_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="different hosts"):
        choose_transport(named, ("cpu", "cpu"), same_host=False)
