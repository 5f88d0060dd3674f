"""`--on ray` explains a missing Ray and a wrong address; tests/system/test_ray.py tests Ray itself."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.deploy import cli
from asyncrl.deploy.clusters.ray_hosts import _refuse_address
from asyncrl.errors import ConfigError
from asyncrl.lanes.bound_socket import bound_socket


def test_without_ray_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["run", "quickstart", "--on", "ray", "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("asyncrl: --on ray: Ray is not installed here; run: ")
    assert "[ray]" in said


def test_another_cluster_than_one_of_ray_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "quickstart", "--on", "slurm"]) == 2
    assert "--on: there is no 'slurm'; write --on ray" in capsys.readouterr().err
    assert cli.main(["run", "quickstart", "--address", "10.0.0.1:6379"]) == 2
    assert "--address is that of a Ray cluster: write --on ray too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ray://10.0.0.1:10001", "--address: ray://10.0.0.1:10001 is for clients outside of a Ray cluster"),
        ("http://10.0.0.1:8265", "use `ray job submit -- .*asyncrl.* run NAME --on ray`"),
        ("head", "'head' is no address of a Ray cluster; write HOST:PORT of its head"),
        ("no.such.host.invalid:6379", "no Ray cluster was reached at no.such.host.invalid:6379 within 5 s"),
    ],
)
def test_an_address_that_cannot_be_of_a_head_is_refused_with_what_to_write(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        _refuse_address(address, "--address")


def test_a_port_where_nothing_listens_is_refused_at_once() -> None:
    with closing(bound_socket("127.0.0.1", 0, "a test")) as socket:
        port = socket.getsockname()[1]
    text = f"RAY_ADDRESS: no Ray cluster was reached at 127.0.0.1:{port} .* `ray start --head --port={port}`"
    with pytest.raises(ConfigError, match=text):
        _refuse_address(f"127.0.0.1:{port}", "RAY_ADDRESS")
