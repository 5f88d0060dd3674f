"""Bytes that processes receive as they regroup, as the kernel counts them."""

import socket
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from asyncrl.bench.transfer_speed import weight_regrouping

ROWS = {
    ("1-2-2", "1-1", "zero-redundancy"): ("1/2", "0"),
    ("1-4-1", "1-1", "zero-redundancy"): ("3/4", "0"),
    ("1-4-1", "1-2", "zero-redundancy"): ("1/4", "0"),
    ("1-4-1", "1-4", "zero-redundancy"): ("0", "0"),
    ("2-2-1", "1-1", "zero-redundancy"): ("3/4", "0"),
    ("2-2-1", "1-2", "zero-redundancy"): ("1/4", "0"),
    ("2-2-1", "2-1", "zero-redundancy"): ("1/4", "0"),
    ("1-4-1", "1-2", "vanilla"): ("3/4", "1/4"),
    ("2-2-1", "2-1", "vanilla"): ("3/4", "1/4"),
}
"""Shares of the model that the worst rank receives, and does not use: (d_g - 1) / (t p), and with vanilla groups
(t p - 1) / (t p) and 1 / (t p)."""


def test_the_kernel_counts_the_end_of_a_connection_as_a_byte() -> None:
    before = weight_regrouping._received()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender:
            receiver, _ = server.accept()
            sender.sendall(b"0123456789")
            assert receiver.recv(10, socket.MSG_WAITALL) == b"0123456789"
            assert weight_regrouping._received() - before == 10
        with receiver:
            assert receiver.recv(1) == b""
            assert weight_regrouping._received() - before == 11


def test_no_rank_closes_its_connections_before_the_slowest_has_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of them counts up to a tenth of a second late, as if others had the CPU, or once another has closed."""
    received, destroy = weight_regrouping._received, weight_regrouping.dist.destroy_process_group
    closed, is_late = get_context("fork").Event(), list[bool]()

    def late() -> int:
        if not is_late:
            try:
                (tmp_path / "late").touch(exist_ok=False)
                is_late.append(True)
            except FileExistsError:
                is_late.append(False)
        if is_late[0]:
            closed.wait(0.1)
        return received()

    def close() -> None:
        destroy()
        closed.set()

    monkeypatch.setattr(weight_regrouping, "_received", late)
    monkeypatch.setattr(weight_regrouping.dist, "destroy_process_group", close)
    found = weight_regrouping.measure(2)
    assert {each.excess for each in found} == {0}


def test_ranks_receive_what_table_2_says_to_the_byte() -> None:
    command = [sys.executable, "-m", "asyncrl.bench.cli", "regroup", "--ranks", "4"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    rows = [line.split() for line in printed.splitlines()]
    found = {tuple(row[:3]): (row[4], row[6]) for row in rows if len(row) == 7}
    assert found.items() >= ROWS.items()
    assert "met     bytes received beyond Table 2, of any rank: 0, goal at most 0" in printed
    assert "met     bytes unused with zero-redundancy, of any rank: 0, goal at most 0" in printed
