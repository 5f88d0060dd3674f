"""Bytes that processes receive as they regroup, as the kernel counts them."""

import subprocess
import sys

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


def test_ranks_receive_what_table_2_says_to_the_byte() -> None:
    command = [sys.executable, "-m", "asyncrl.bench.cli", "regroup", "--ranks", "4"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    rows = [line.split() for line in printed.splitlines()]
    found = {tuple(row[:3]): (row[4], row[6]) for row in rows if len(row) == 7}
    assert found.items() >= ROWS.items()
    assert "met     bytes received beyond Table 2, of any rank: 0, goal at most 0" in printed
    assert "met     bytes unused with zero-redundancy, of any rank: 0, goal at most 0" in printed
