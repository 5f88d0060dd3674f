"""The facts of transports and engines are whole, and agree with each other."""

from typing import get_args

from asyncrl.config.sections.generation_engines import ENGINES, EngineName
from asyncrl.protocols.weight_transports import TRANSPORTS, TransportName


def test_every_value_has_its_facts() -> None:
    assert {*TRANSPORTS} == {*get_args(TransportName), "inproc"}
    assert {*ENGINES} == {*get_args(EngineName)}


def test_what_is_read_in_place_is_copied_by_no_reader() -> None:
    assert [name for name, each in TRANSPORTS.items() if not each.taken] == ["auto", "inproc", "shm", "cuda_ipc"]
    assert all(each.offered for each in TRANSPORTS.values() if each.taken or each.on == "gpu")


def test_what_engines_read_are_transports() -> None:
    assert {name for each in ENGINES.values() for name in each.transports} <= {*get_args(TransportName)}
    assert [name for name, each in ENGINES.items() if each.reads("tcp")] == ["torch"]
