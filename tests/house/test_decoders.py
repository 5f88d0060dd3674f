"""The list of decoders is whole: a new one gets a target, or a reason why it needs none."""

from pathlib import Path

from tests.fuzz.all_targets import TARGETS
from tests.fuzz.decoders import FUZZED, UNFUZZED, decodes, decoding_modules
from tests.fuzz.unguided import UNGUIDED

ROOT = Path(__file__).parents[2]


def test_each_module_that_decodes_is_fuzzed_or_says_why_not() -> None:
    found = {*decoding_modules(ROOT)}
    assert found - {*FUZZED, *UNFUZZED} == set(), "add them to tests/fuzz/decoders.py, with a target where others write"
    assert {*FUZZED, *UNFUZZED} - found == set(), "they decode nothing any more"
    assert not {*FUZZED} & {*UNFUZZED}


def test_each_fuzzed_module_names_targets_that_exist() -> None:
    assert {name for names in FUZZED.values() for name in names} <= {*TARGETS}


def test_decoding_is_seen() -> None:
    assert decodes("import json\ndef f(x):\n    return json.loads(x)")
    assert decodes("HEAD.unpack_from(data, 3)")
    assert not decodes("json.dumps(x)\nzlib.decompress(x)\nprint('json.loads')")


def test_the_long_mode_takes_all_targets() -> None:
    script = (ROOT / "scripts" / "fuzz").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("all=(")]
    (unguided,) = [line for line in script.splitlines() if line.startswith("unguided=")]
    assert line.removeprefix("all=(").removesuffix(")").split() == [*TARGETS]
    assert unguided.removeprefix('unguided="').removesuffix('"').split() == [*UNGUIDED]
