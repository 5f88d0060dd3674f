"""CuPy and NCCL without a driver: what our bindings call exists, and NCCL says that there is no device.

Where they are not installed, these tests are skipped. They want an environment of their own, for CuPy and NCCL take
0.9 GB: `python -m pip install -e .[dev,cu12]`, then pytest with this file.
"""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from asyncrl.errors import ConfigError, PeerLost
from asyncrl.lanes.weights.transports.device_arena import HANDLE_BYTES, CupyRuntime
from asyncrl.lanes.weights.transports.nccl import Nccl4py

UNIQUE_ID_BYTES = 128


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here: tests/gpu has the real calls")
def test_nccl_is_called_and_reports_that_it_has_no_device() -> None:
    pytest.importorskip("nccl.core", reason="install the extra cu12")
    library = Nccl4py("cuda:0")
    unique_id = library.unique_id()
    assert len(unique_id) == UNIQUE_ID_BYTES
    assert unique_id != library.unique_id()
    with pytest.raises(PeerLost, match="NCCL failed"):
        library.connect(unique_id, 0)


@pytest.mark.parametrize(("state", "said"), [(0, ""), (7, None), (6, "error 6: it is gone")])
def test_the_state_of_a_communicator_may_be_a_plain_number(state: int, said: str | None) -> None:
    handle = SimpleNamespace(get_async_error=lambda: state, get_last_error=lambda: "it is gone")
    assert Nccl4py.failure(cast(Any, None), cast(Any, SimpleNamespace(handle=handle))) == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here: tests/gpu has the real calls")
def test_cuda_is_called_and_reports_that_it_has_no_device() -> None:
    cupy = pytest.importorskip("cupy", reason="install the extra cu12")
    cuda = CupyRuntime("cuda:0")
    for call in (
        lambda: cuda.allocate(10),
        lambda: cuda.open(bytes(HANDLE_BYTES)),
        lambda: cuda.register(4096, 4096, read_only=True),
    ):
        with pytest.raises((cupy.cuda.runtime.CUDARuntimeError, MemoryError, PeerLost), match=r"Insufficient|no "):
            call()
    for name in ("malloc", "ipcGetMemHandle", "ipcOpenMemHandle", "hostRegister", "hostUnregister"):
        assert callable(getattr(cupy.cuda.runtime, name))


def test_a_missing_binding_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(ConfigError, match="cu12, or cu13"):
        CupyRuntime("cuda:0")
    with pytest.raises(ConfigError, match="cu12, or cu13"):
        Nccl4py("cuda:0")
