"""The hosts that other tests put fleets on: they reach each other, fail as asked, and leave nothing."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.lanes.host_id import HostId
from tests.network_hosts import NetworkHosts, network_hosts, why_no_hosts

sys.path.insert(0, str(Path(__file__).parent))
from watching import dead, wait_until

pytestmark = pytest.mark.fleet

SERVER = """
import socket
listening = socket.create_server(("0.0.0.0", 7000))
print("listens", flush=True)
while True:
    connection, (host, _) = listening.accept()
    connection.sendall(host.encode())
    connection.close()
"""
CLIENT = """
import socket
with socket.create_connection(("h1", 7000), 1.0) as connection:
    print(connection.recv(100).decode())
"""
IDENTITY = "from asyncrl.lanes.host_id import HostId; here = HostId.here(); print(here.name, here.machine, here.memory)"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[NetworkHosts]:
    if why := why_no_hosts():
        pytest.skip(why)
    with network_hosts(tmp_path, 2) as made:
        yield made
    assert made.prefix not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def printed(hosts: NetworkHosts, number: int, program: str, output: Path) -> str:
    output.unlink(missing_ok=True)
    hosts.start(number, [sys.executable, "-c", program], output).wait(20)
    return output.read_text()


def start_server(hosts: NetworkHosts, output: Path) -> None:
    hosts.start(1, [sys.executable, "-c", SERVER], output)
    wait_until(lambda: "listens" in output.read_text(), output.read_text)


def test_hosts_have_names_identities_and_memory_of_their_own(hosts: NetworkHosts, tmp_path: Path) -> None:
    one, two = (printed(hosts, number, IDENTITY, tmp_path / "out").split() for number in (1, 2))
    here = HostId.here()
    assert (one[0], two[0]) == ("h1", "h2")
    assert len({one[1], two[1], here.machine}) == 3
    assert len({one[2], two[2], here.memory}) == 3


def test_the_network_fails_as_asked_and_heals(hosts: NetworkHosts, tmp_path: Path) -> None:
    start_server(hosts, tmp_path / "server")

    def client() -> str:
        return printed(hosts, 2, CLIENT, tmp_path / "client")

    assert client() == "10.77.0.2\n"
    hosts.cut(2)
    assert "Error" in client()
    hosts.heal(2)
    assert client() == "10.77.0.2\n"
    hosts.lose(2, 1)
    assert "timed out" in client()
    hosts.lose_no_more(2, 1)
    hosts.limit_rate(2, "10mbit")
    assert client() == "10.77.0.2\n"
    hosts.limit_no_more(2)


def test_a_killed_host_takes_its_processes_along_and_boots_again(hosts: NetworkHosts, tmp_path: Path) -> None:
    start_server(hosts, tmp_path / "server")
    stays = hosts.start(2, ["sleep", "100"], tmp_path / "stays")
    ends = hosts.start(1, ["sleep", "100"], tmp_path / "ends")
    wait_until(lambda: ends.pid is not None and stays.pid is not None, "both programs")
    pid = ends.pid
    hosts.kill(1)
    assert ends.wait(10) == -signal.SIGKILL
    assert dead(pid)
    assert stays.poll() is None
    assert "Error" in printed(hosts, 2, CLIENT, tmp_path / "client")
    start_server(hosts, tmp_path / "again")
    assert printed(hosts, 2, CLIENT, tmp_path / "client") == "10.77.0.2\n"


def test_signals_reach_the_program_and_its_exit_status_comes_back(hosts: NetworkHosts, tmp_path: Path) -> None:
    sleeps = hosts.start(1, ["sleep", "100"], tmp_path / "out")
    wait_until(lambda: sleeps.pid is not None, "the program")
    sleeps.send_signal(signal.SIGTERM)
    assert sleeps.wait(10) == -signal.SIGTERM
    assert hosts.start(1, ["sh", "-c", "exit 75"], tmp_path / "out").wait(10) == 75
    killed = hosts.start(1, ["sleep", "100"], tmp_path / "out")
    wait_until(lambda: killed.pid is not None, "the program")
    killed.kill()
    assert killed.poll() == -signal.SIGKILL
