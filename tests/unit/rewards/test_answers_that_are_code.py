"""The text of a model is data: no template runs it, and code has the score of nonsense."""

import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncrl.children.sandbox import SandboxError, package_calls
from asyncrl.children.sandbox.bubblewrap import sandbox_command
from asyncrl.children.sandbox.inside.package_server import Evaluations, answer_of
from asyncrl.children.sandbox.package_calls import PackageSandbox, Unjudged
from asyncrl.environments.loading import ADAPTERS, BUILTIN
from asyncrl.rewards.execution.function_call import attempt
from asyncrl.rewards.functions import OF_PACKAGES, FunctionSpec, load
from asyncrl.rewards.sample import RowError, Sample
from asyncrl.rewards.templates import CODE_TEMPLATES, SCORES, TEMPLATES
from tests import golden

EVALUATING = (
    *("spiral_matrix", "string_insertion", "binary_matrix", "n_queens", "countdown", "puzzle24"),
    *("simple_integration", "intermediate_integration", "polynomial_multiplication"),
)
"""Data sets of reasoning-gym that evaluate an answer."""
CODE = (
    "open({!r}, 'w').write('ran')",
    "__import__('pathlib').Path({!r}).touch()",
    "[open({!r}, 'w') for _ in (1,)]",
    "(lambda: open({!r}, 'w'))()",
    "eval(\"open({!r}, 'w')\")",
    "Symbol('x').__class__.__init__.__globals__['sys'].modules['os'].mknod({!r})",
    "S(\"open({!r}, 'w')\")",
    "lambdify((), Symbol(\"open({!r}, 'w')\"))()",
    "().__class__.__base__.__subclasses__()[0]({!r})",
    "f\"{{open({!r}, 'w')}}\"",
    "\\boxed{{__import__('os').mknod({!r})}}",
    "$\\operatorname{{open}}({!r}, 'w')$",
)
READS = ("oracle_answer.split()", "[r.split() for r in valid_solutions[0].split(chr(10))]", "list(oracle_answer)")
CHANGES = "[setattr(type(self), 'score_answer', lambda self, answer, entry: 1.0)]"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()


def sample(text: str, row: dict[str, Any]) -> Sample:
    return Sample("p", text, row, 0, 0, "stop", 1)


def entry(name: str) -> dict[str, Any]:
    return {"reasoning_gym": {"name": name, "options": {"size": 4, "seed": 1}, "index": 0}}


@pytest.mark.parametrize("name", EVALUATING)
def test_no_data_set_runs_an_answer(name: str, path: Path, bubblewrap_works: None) -> None:
    reward: Any = TEMPLATES["reasoning_gym"]()
    nonsense = {reward(sample(text, entry(name))) for text in ("nonsense words", "$", "1 +")}
    for code in (*(code.format(str(path)) for code in CODE), *READS, CHANGES):
        assert reward(sample(code, entry(name))) in nonsense, code


def test_an_answer_changes_nothing_for_the_next_one(bubblewrap_works: None) -> None:
    reward: Any = TEMPLATES["reasoning_gym"]()
    for change in (CHANGES, "[setattr(self, 'score_answer', None)]", "[__builtins__.update(str=None)]"):
        reward(sample(change, entry("spiral_matrix")))
        assert reward(sample("anything at all", entry("spiral_matrix"))) == 0
    import reasoning_gym

    origin = entry("spiral_matrix")["reasoning_gym"]
    data = reasoning_gym.create_dataset("spiral_matrix", **origin["options"])
    assert reward(sample(data[0]["answer"], entry("spiral_matrix"))) == 1
    assert reward(sample(str(data[0]["answer"].split()), entry("spiral_matrix"))) == 0.1


def test_a_row_of_another_entry_is_refused(bubblewrap_works: None) -> None:
    """Some data sets depend on the order of a set: what this process made, another one does not make again."""
    reward: Any = TEMPLATES["reasoning_gym"]()
    row = {**entry("spiral_matrix"), "answer": "1 2 3"}
    with golden.raises(RowError, match="spiral_matrix"):
        reward(sample("1 2 3", row))


@pytest.mark.parametrize("text", ["nan", "NaN", "nan+nanj", "NaNi", "-nan - 4.0i"])
def test_what_agrees_with_every_number_earns_nothing(text: str, bubblewrap_works: None) -> None:
    import reasoning_gym

    row = entry("complex_arithmetic")
    right = reasoning_gym.create_dataset("complex_arithmetic", **row["reasoning_gym"]["options"])[0]["answer"]
    reward: Any = TEMPLATES["reasoning_gym"]()
    assert [reward(sample(each, row)) for each in (text, right)] == [0.0, 1.0]


def test_an_entry_that_any_text_solves_is_refused(bubblewrap_works: None) -> None:
    reward: Any = TEMPLATES["reasoning_gym"]()
    with golden.raises(RowError, match="game_of_life_halting"):
        reward(sample("True", entry("game_of_life_halting")))


PLAIN = {name: made for name, made in TEMPLATES.items() if name not in ("judge", "reasoning_gym", "math_verify")}
OPTIONS = {"regex_format": {"pattern": "a+"}, "length": {"maximum": 9, "slack": 2}}


@pytest.mark.parametrize("name", PLAIN)
async def test_every_other_template_takes_code_for_text(name: str, path: Path, bubblewrap_works: None) -> None:
    """Templates for programs run the answer in the sandbox for programs, which sees no folder of the test."""
    function = load(FunctionSpec(name, name, options=OPTIONS.get(name, {})))
    row = {"answer": "4", "tests": ["assert f(2) == 4"]}
    for code in CODE:
        (result,) = await attempt(function, [sample(code.format(str(path)), row)], False, 60.0)
        assert not result.reason
    if name in ("compiles", "passes_tests", "lint"):
        from asyncrl.children.code.code_runner import shared_runner

        await shared_runner().close()


@pytest.mark.skipif(find_spec("math_verify") is None, reason="the extra `math` is not installed")
def test_math_verify_runs_no_answer(path: Path, bubblewrap_works: None) -> None:
    reward: Any = TEMPLATES["math_verify"]()
    for code in CODE:
        assert reward(sample(code.format(str(path)), {"answer": "4"})) == 0, code
        assert reward(sample("4", {"answer": "4"})) == 1


@pytest.mark.parametrize("text", ["[9**9**9]", "(" * 50_000, "factorial(10**9)", "2**(2**40)"])
async def test_an_answer_that_hangs_or_bursts_counts_nothing_and_costs_its_seconds(
    text: str, bubblewrap_works: None
) -> None:
    reward = TEMPLATES["reasoning_gym"](seconds=0.5)
    for name in ("countdown", "spiral_matrix"):
        (result,) = await attempt(reward, [sample(text, entry(name))], False, 60.0)
        assert result.unjudged or result.value in (0.0, 0.01)
        (after,) = await attempt(reward, [sample("no", entry(name))], False, 60.0)
        assert after.value in (0.0, 0.01)


@pytest.fixture
def evaluate(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return Evaluations(alone=getattr(request, "param", False)).evaluate


@pytest.mark.parametrize("evaluate", [False, True], indirect=True)
@pytest.mark.parametrize(
    ("text", "value"),
    [("[1, 2]", [1, 2]), ("1 + 2 * 3", 7), ("'abc'", "abc"), ("{'a': (1, None)}", {"a": (1, None)}), (" -0x1f ", -31)],
)
def test_literals_and_arithmetic_are_evaluated(evaluate: Callable[..., Any], text: str, value: object) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize("evaluate", [False, True], indirect=True)
@pytest.mark.parametrize(
    "text",
    [
        *("value", "len('a')", "'a'.upper()", "(lambda: 1)()", "[x for x in (1, 2)]", "{x for x in 'a'}"),
        *("f'{[].append}'", "().__class__", "__import__('os')", "print", "type(1)", "'{0.real}'.format(1)"),
    ],
)
def test_code_is_refused(evaluate: Callable[..., Any], text: str) -> None:
    with golden.raises(ValueError):
        evaluate(text)
    with golden.raises(ValueError):
        evaluate(compile(text, "answer", "eval"), {"__builtins__": __builtins__, "print": print, "len": len})


def test_names_of_mathematics_are_read_in_a_fresh_interpreter() -> None:
    sympy = pytest.importorskip("sympy")
    alone = Evaluations(alone=True)
    shared = Evaluations(alone=False)
    with alone.installed():
        assert sympy.parse_expr("sin(x)**2 + sqrt(4) + abs(-y)") == sympy.sympify("2") + sympy.sin(
            sympy.Symbol("x")
        ) ** 2 + sympy.Abs(sympy.Symbol("y"))
    assert not alone.refused
    with shared.installed(), golden.raises(ValueError):
        sympy.parse_expr("Function('open')(x)")
    assert shared.refused


def test_a_fresh_interpreter_ends_with_its_answer() -> None:
    """A reader that changes itself where it evaluates what is no plain number."""
    state: list[str] = []

    def reader(wanted: str) -> Callable[[str], int]:
        def read(text: str) -> int:
            eval("print")
            state.append(text)
            return len(state)

        def guarded(text: str) -> int:
            try:
                return read(text)
            except ValueError:
                state.append(text)
                return len(state)

        return guarded

    found = [answer_of(reader, "", "x") for _ in range(2)]
    assert [kind for kind, _ in found] == ["value"] * 2
    assert len(state) == 2, "what the forked interpreter changed stayed there"
    assert json.dumps(found)


@pytest.mark.parametrize(
    "line",
    [b"", b'["value", 1', b'["value", NaN]\n', b'["value", "1"]\n', b"[" * 4000 + b"\n", b'["value", 1e999]\n', b"1\n"],
)
def test_a_sandbox_that_says_what_is_no_number_gives_none(line: bytes) -> None:
    with pytest.raises(Unjudged):
        package_calls._answer(line)
    assert package_calls._answer(b'["value", 0.5]\n') == 0.5


def test_a_package_that_is_missing_is_named(bubblewrap_works: None) -> None:
    sandbox = PackageSandbox(SCORES, ("no_such_package",), "bubblewrap")
    with pytest.raises(SandboxError, match=r"could not start: ModuleNotFoundError: .*no_such_package"):
        sandbox.warm_up()


def test_the_sandbox_sees_neither_the_current_folder_nor_a_checkout(bubblewrap_works: None) -> None:
    folders = package_calls._folders()
    assert not any(Path.cwd().is_relative_to(folder) for folder in folders)
    assert not any(str(Path.home()) == folder for folder in folders)


def test_packages_below_a_folder_of_the_sandboxs_own_are_seen(tmp_path: Path, bubblewrap_works: None) -> None:
    """A checkout below /tmp: what the sandbox writes there is its own, and the packages stand in it."""
    words = sandbox_command(2**20, 3, (str(tmp_path),))
    assert words.index(str(tmp_path)) > words.index("--tmpfs", words.index("--size")) > words.index("/usr")


def test_reads_without_containment_too() -> None:
    reward: Any = TEMPLATES["reasoning_gym"](sandbox="none")
    assert reward(sample("1 2", entry("spiral_matrix"))) == 0
    sandbox = next(each for each in package_calls.OPEN if not each._contained)
    with golden.raises(Unjudged, match="within 0"):
        sandbox.read(
            "reasoning_gym", json.dumps({**entry("countdown")["reasoning_gym"], "answer": None}), '"9**9**9"', 0.05
        )
    sandbox.close()


def test_the_table_of_who_reads_an_answer_is_whole() -> None:
    rows = re.findall(
        r"^\| (reward|environment) `(\w+)` \|.*\| (.+) \|$", Path("SECURITY.md").read_text(), re.MULTILINE
    )
    assert {name for kind, name, _ in rows if kind == "reward"} == {*TEMPLATES}
    assert {name for kind, name, _ in rows if kind == "environment"} == {*BUILTIN, *ADAPTERS}
    inside = {name for kind, name, where in rows if kind == "reward" and where == "sandbox for programs"}
    assert inside == {*CODE_TEMPLATES, *OF_PACKAGES}
