from pathlib import Path

from asyncrl.lanes.host_id import HostId, gpus_of_host


def test_containers_of_one_machine_share_no_memory_and_fail_together() -> None:
    one = HostId("machine", "26", "a")
    other = HostId("machine", "31", "b")
    assert one != other
    assert one.fault_domain == other.fault_domain
    assert one.fault_domain != HostId("another machine", "26").fault_domain


def test_a_host_is_known_by_its_machine_and_not_by_its_name() -> None:
    assert HostId("machine", "26", "a") == HostId("machine", "26", "b")
    assert HostId.here() == HostId.here()


def test_gpus_are_those_that_the_process_may_use(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_of_host({}, tmp_path) == ["cuda:0", "cuda:1", "cuda:2"]
    assert gpus_of_host({"CUDA_VISIBLE_DEVICES": "2,0"}, tmp_path) == ["cuda:0", "cuda:1"]
    assert gpus_of_host({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert gpus_of_host({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, tmp_path) == ["cuda:0"]
    assert gpus_of_host({}, tmp_path / "nowhere") == []
