"""Hundreds of inputs for each reader of strange bytes; `scripts/fuzz --inputs N` takes as many as wanted."""

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.children.child_messages import packed
from asyncrl.controller.journal.journal import FRAME, encode
from asyncrl.lanes.data.row_reader import FETCH
from asyncrl.protocols.messages import Call, FileTree, ListedFile
from tests.fuzz.all_targets import TARGETS
from tests.fuzz.long import UNGUIDED
from tests.fuzz.targets import RECORDS, framed, frames_of, joined

HERE = Path(__file__).parent
INPUTS = 100
WHERE = st.floats(0, 1, exclude_max=True)
EDITS = st.lists(st.tuples(st.integers(0, 4), WHERE, WHERE, st.binary(min_size=1, max_size=8)), min_size=1, max_size=5)

DRAWN, *_ = [encode(record)[FRAME.size :] for record in RECORDS]
FOUND: list[tuple[str, bytes]] = [
    # A child's frame that is no MessagePack, or no answer, ended the reward worker.
    ("reward", b"\x01\0\0\0\xc1"),
    ("reward", b"\x02\0\0\0\x81\xa5"),
    ("reward", b"\xff\xff\xff\xff"),
    ("reward", packed({"results": []})),
    ("reward", packed({"call": [], "results": []})),
    ("reward", packed({"call": 0, "results": 1})),
    ("reward", packed({"call": 0, "results": [[1.0]]})),
    ("reward", packed({"call": 0, "results": [["one", "", ""]]})),
    ("reward", packed({"call": 0, "results": [[1.0, "", ""]] * 3})),
    # Records with a true checksum that are no MessagePack or none of ours were errors of Python.
    ("journal", framed([b"\x91\xa1"])),
    ("journal", framed([b"\x07"])),
    ("journal", framed([msgpack.packb([{"drawn": 1}])])),
    ("journal", framed([msgpack.packb(["drawn", "0", 0, 2])])),
    ("journal", framed([DRAWN, msgpack.packb(["scored", 0, 0, "high"])])),
    ("journal", framed([DRAWN, msgpack.packb(["generated", 0, 0, [[0, 0]]])])),
    # It asked for as much memory as it said.
    ("journal", framed([msgpack.packb(["drawn", 0, 0, 2**62])])),
    ("journal", framed([msgpack.packb(["drawn", 0, 0, -1])])),
    # A manifest could name any file of the machine, some of which never end, or a journal of less than nothing.
    ("manifest", b'{"incarnation":0,"version":0,"offset":1,"crc":1,"chain":"","files":{"/dev/zero":"ab"}}'),
    ("manifest", b'{"incarnation":0,"version":0,"offset":1,"crc":1,"chain":"","files":{"../../x":"ab"}}'),
    ("manifest", b'{"incarnation":0,"version":0,"offset":1,"crc":1,"chain":"","files":{"a\\u0000":"ab"}}'),
    ("manifest", b'{"incarnation":0,"version":0,"offset":-7,"crc":0,"chain":"","files":{}}'),
    ("manifest", b'{"incarnation":0,"version":0,"offset":"1","crc":1,"chain":"","files":{}}'),
    ("manifest", b'{"incarnation":0,"version":0,"offset":1,"crc":1,"chain":"","files":[]}'),
    ("manifest", b"[" * 100_000),
    # The data lane copied as many rows as it was asked for, each time the same one.
    ("worker", b"\3" + joined([frames_of(Call(0, FETCH, ([0] * 2000, [1] * 2000, ["number"], ["number"]), 1.0))])),
    ("worker", b"\3" + joined([frames_of(Call(0, FETCH, (1, None), 1.0))])),
    # Names that no file can have, and sizes, were errors of Python at the host that copies.
    ("files", joined([frames_of(FileTree("/elsewhere", "folder", (ListedFile("model\0", 1, "ab"),)))])),
    ("files", joined([frames_of(FileTree("/else\0where", "folder", (ListedFile("model", 1, "ab"),)))])),
    ("files", joined([frames_of(FileTree("/elsewhere", "folder", (ListedFile(".", 0, "ab"),)))])),
    # A header Retry-After that ends with a separator was no number, and an error of Python.
    ("judge", b"5\x1f"),
    # A row that is no map was a TypeError.
    ("rows", b"\0"),
]


@pytest.fixture(scope="module", params=sorted(TARGETS))
def target(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = TARGETS[request.param]()
    yield made
    made.close()


def edited(seed: bytes, edits: list[tuple[int, float, float, bytes]]) -> bytes:
    """Overwrite, insert, cut, repeat a piece, cut off the end."""
    data = bytearray(seed)
    for kind, where, other, new in edits:
        at = int(where * len(data))
        source = int(other * len(data))
        pieces = (new, new, b"", bytes(data[source : source + 40]), b"")
        ends = (at + len(new), at, at + len(new), at, len(data))
        data[at : ends[kind]] = pieces[kind]
    return bytes(data)


def test_what_is_sound_is_taken(target: Any) -> None:
    for seed in target.seeds:
        target(seed)


@settings(max_examples=INPUTS, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.data())
def test_strange_bytes_are_refused_and_nothing_else_happens(target: Any, data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(target.seeds))
    target(data.draw(st.binary(max_size=300) | st.builds(edited, st.just(seed), EDITS)))


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_once_a_defect_stays_mended(name: str, data: bytes) -> None:
    found = TARGETS[name]()
    with closing(found):
        found(data)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_memory_does_not_grow_with_the_number_of_inputs(name: str) -> None:
    """By less than a byte for each byte read; the first round fills pools and caches."""
    with closing(TARGETS[name]()) as target:
        inputs = [
            edited(seed, [(0, place / 50, 0.0, b"\xdd\xff\xff\xff\xff")])
            for seed in target.seeds
            for place in range(50)
        ]
        grown = [resident_after(target, inputs, rounds) for rounds in (2, 4)]
    assert grown[1] - grown[0] < max(4 << 20, sum(map(len, inputs)))


def resident_after(target: Any, inputs: list[bytes], rounds: int) -> int:
    """Returns the bytes of this process in memory after all inputs. Each round collects its garbage: tests do that
    seldom, and what waits for it is no growth."""
    for _ in range(rounds):
        for data in inputs:
            target(data)
        gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_long_mode_takes_all_targets() -> None:
    lines = (HERE.parents[1] / "scripts" / "fuzz").read_text().splitlines()
    (every,) = [line for line in lines if line.startswith("all=(")]
    (unguided,) = [line for line in lines if line.startswith("unguided=")]
    assert every.removeprefix("all=(").removesuffix(")").split() == [*TARGETS]
    assert unguided.removeprefix('unguided="').removesuffix('"').split() == [*UNGUIDED]
