from asyncrl.lanes.host_id import HostId


def test_containers_of_one_machine_share_no_memory_and_fail_together() -> None:
    one, other = HostId("machine", "26", "a"), HostId("machine", "31", "b")
    assert one != other
    assert one.fault_domain == other.fault_domain
    assert one.fault_domain != HostId("another machine", "26").fault_domain


def test_a_host_is_known_by_its_machine_and_not_by_its_name() -> None:
    assert HostId("machine", "26", "a") == HostId("machine", "26", "b")
    assert HostId.here() == HostId.here()
