"""A test sees plain values of the program's functions, and objects only of classes that it names."""

import pytest

from asyncrl.children.sandbox import CaseResult, Program, SandboxPool, TestCase

AGREES = """
class Any(META):
    def __getattr__(self, name): return Any()
    def __call__(self, *a, **k): return True
    def __bool__(self): return True
    def __len__(self): return 1
    def __iter__(self): return iter(())
    def __next__(self): raise StopIteration
    def __contains__(self, x): return True
    def __getitem__(self, k): return Any()
    def __hash__(self): return 0
    def __str__(self): return "a b c 1 2 3"
    def __index__(self): return 1
    def __instancecheck__(self, x): return True
    __repr__ = __format__ = __str__
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __mod__ = __floordiv__ = __abs__ = lambda self, *a: Any()
    __round__ = __neg__ = __and__ = __or__ = lambda self, *a: Any()
    def __enter__(self): return self
    def __exit__(self, *a): return True
    startswith = endswith = isdigit = issubset = is_integer = items = keys = count = index = __call__
def f(*a, **k): return GIVEN
"""
USUAL = (
    "assert f(2)",
    "assert f(2) == 4",
    "assert f(2) != 5",
    "assert not f(2)",
    "assert 4 in f(2)",
    "assert 5 not in f(2)",
    "assert f(2) in (4, 5)",
    "assert f(2) in {4: 1}",
    "assert f(2).startswith('4')",
    "assert f('x').isdigit()",
    "assert f(2) > 3",
    "assert 3 < f(2) < 5",
    "assert abs(f(2) - 4) < 1e-9",
    "assert round(f(2)) == 4",
    "assert len(f(2)) == 1",
    "assert len(f(2)) > 0",
    "assert all(x > 1 for x in f(2))",
    "assert any(x > 1 for x in f(2))",
    "assert f(2)[0]",
    "assert f(2)['a']",
    "assert isinstance(f(2), int)",
    "assert sorted(f(2)) == [4]",
    "assert set(f(2)) <= {4}",
    "assert list(f(2)) == []",
    "assert sum(f(2)) == 0",
    "assert str(f(2)) == 'a b c 1 2 3'",
    "assert f'{f(2)}' == 'a b c 1 2 3'",
    "assert f(2).count",
    "assert f(2).is_valid",
    "assert f(2)(3)",
    "assert next(f(2), True)",
    "assert dict(f(2)) == {}",
    "assert tuple(f(2)) == ()",
    "assert max(f(2), default=4) == 4",
    "assert f(2) is not None and f(2).ok",
    "assert {*f(2)} == set()",
    "for x in f(2): assert x == 4",
    "for x in f(2).items(): assert x == 4",
    "a, = f(2), \nassert 1 in a",
    "import unittest\nunittest.TestCase().assertTrue(f(2))",
    "import unittest\nunittest.TestCase().assertIn(4, f(2))",
    "import unittest\nunittest.TestCase().assertGreater(f(2), 3)",
    "import unittest\nunittest.TestCase().assertCountEqual(f(2), [])",
    "with f(2) as x: assert x == 4",
    "assert f.checked(2)",
    "assert 4 in f",
    "assert Solution().f(2).startswith('4')",
    "assert 4 in Solution().f(2)",
    "assert Solution().f(2)",
)
"""Usual ways to write a test, more than half of which ask the object itself."""
MAYBE = {"assert f(2) != 5": "no", "assert isinstance(f(2), int)": "no"}


async def result_of(pool: SandboxPool, source: str, test: str, objects: bool = False) -> CaseResult:
    (result,) = await pool.run_all(Program(source, (TestCase("t", test, objects=objects),)))
    return result


@pytest.mark.parametrize("given", ["Any()", "[Any()]", "type('list', (Any,), {})()", "Any"])
async def test_an_object_that_agrees_to_everything_passes_no_test(pool: SandboxPool, given: str) -> None:
    source = AGREES.replace("META", "").replace("GIVEN", given).replace("class Any()", "class Any")
    source += "class Solution:\n    def f(self, *a): return f(*a)\n"
    tests = USUAL if given != "[Any()]" else [each for each in USUAL if "f(2)[0]" in each or "for x in f(2):" in each]
    program = Program(source, tuple(TestCase(test, test) for test in tests))
    passed = [result.name for result in await pool.run_all(program) if result.passed]
    assert passed == []


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def f(n): return (i * i for i in range(n))", "assert list(f(3)) == [0, 1, 4]\nassert next(f(2)) == 0"),
        ("def f(n): return range(n)", "assert 2 in f(3) and 3 not in f(3) and len(f(3)) == 3 and f(3)[1] == 1"),
        ("def f(n): return {1: 2}.items()", "assert sorted(f(0)) == [(1, 2)]"),
        ("def f(n): return map(str, range(n))", "assert all(x == str(i) for i, x in enumerate(f(3)))"),
        ("from collections import deque\ndef f(n): return deque([1, n])", "assert list(f(2)) == [1, 2]"),
        ("from itertools import chain\ndef f(n): return chain([1], [n])", "assert [*f(2)] == [1, 2]"),
        ("def f(n): return iter('ab')", "assert ''.join(f(0)) == 'ab'"),
        ("class Stack:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n"
         "    def pop(self): return self.x.pop()\n    def __len__(self): return len(self.x)\n"
         "    def __contains__(self, v): return v in self.x",
         "s = Stack()\ns.push(3)\nassert len(s) == 1 and 3 in s and s.x == [3] and s.pop() == 3"),
        ("class Node:\n    def __init__(self, v, n=None): self.val, self.next = v, n\ndef f(n): return n.next.val",
         "n = Node(1, Node(2))\nassert f(n) == 2 and n.next.val == 2"),
        ("class Solution:\n    def f(self, n): return [n]", "assert Solution().f(2) == [2] and 2 in Solution().f(2)"),
    ],
)  # fmt: skip
async def test_honest_programs_pass(pool: SandboxPool, source: str, test: str) -> None:
    result = await result_of(pool, source, test)
    assert result.passed, result


ADDER = "def f(n): return lambda x: x + n\nclass P: x = 1\ndef g(): return P()"


@pytest.mark.parametrize("test", ["assert f(2)(3) == 5", "assert g().x == 1"])
async def test_objects_of_functions_need_a_test_that_says_so(pool: SandboxPool, test: str) -> None:
    refused = await result_of(pool, ADDER, test)
    assert refused.outcome == "failed"
    assert "a test of objects says so, by the line `# objects = true`" in refused.detail
    assert (await result_of(pool, ADDER, test, objects=True)).passed
    assert not (await result_of(pool, ADDER, "assert g() == 1", objects=True)).passed
