"""`asyncrl tune`: the values of a search as they are typed, and a whole search whose metrics a fake writes."""

import fcntl
import importlib.util
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.deploy import cli
from asyncrl.deploy.commands import tune, tuning_search
from asyncrl.deploy.commands.tune import conclusion, table
from asyncrl.deploy.commands.tuning_search import (
    CandidateRun,
    Dimension,
    PairedDifference,
    Search,
    SearchCandidate,
    SearchRequest,
    open_search,
    optuna,
    paired,
    parse_space,
    rungs,
    score,
)
from asyncrl.errors import ConfigError, Interrupted

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="Optuna (extra `tune`) is not installed"
)
REQUEST = SearchRequest("quickstart", ["staleness.limit=0..63"], candidates=9, seeds=[3, 4], steps=18)


def fake_training(
    best: int, calls: list[CandidateRun], failing: Callable[[CandidateRun], str] = lambda run: ""
) -> object:
    """Returns what writes rewards that grow with the step, most for the value `best`, and differ by seed."""

    def train(run: CandidateRun) -> str:
        calls.append(run)
        if text := failing(run):
            return text
        limit = run.values.get("staleness.limit", 40)
        seed = run.values["seed"]
        run.run_dir.mkdir(parents=True, exist_ok=True)
        made = [
            {
                "step": step,
                "incarnation": 0,
                "time": step / 2,
                "reward/mean": step * (1 - abs(limit - best) / 64) + seed,
            }
            for step in range(1, run.last_step + 1)
        ]
        (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
        return ""

    return train


def search(
    folder: Path, train: object, request: SearchRequest = REQUEST
) -> tuple[SearchCandidate, list[SearchCandidate]]:
    assert callable(train)
    with open_search(folder, request) as (study, kept):
        return Search(folder, kept, study, train, lambda text: None).run()


@needs_optuna
def test_the_nearest_candidates_get_all_steps(tmp_path: Path) -> None:
    calls: list[CandidateRun] = []
    own, found = search(tmp_path, fake_training(7, calls))
    nearest = sorted(found, key=lambda each: abs(each.values["staleness.limit"] - 7))
    assert found[0] is nearest[0]
    assert [each.steps for each in found] == [18, 6, 6, 2, 2, 2, 2, 2, 2]
    assert {each.number for each in found[:3]} == {each.number for each in nearest[:3]}
    assert len({each.values["staleness.limit"] for each in found}) == 9
    # Seed by seed the difference is the same, whatever a seed adds.
    assert found[0].difference is not None
    assert found[0].difference.error == pytest.approx(0, abs=1e-9)
    assert (own.steps, own.number, own.step_seconds) == (18, 0, 0.5)
    # Both seeds of own values, and of 9, 3 and 1 candidates.
    assert len(calls) == 2 * (1 + 9 + 3 + 1)
    assert {run.values["seed"] for run in calls} == {3, 4}


@needs_optuna
def test_a_search_that_was_cut_off_goes_on_with_the_same_candidates(tmp_path: Path) -> None:
    def cut_off(run: CandidateRun) -> str:
        if len(calls) == 9:
            raise Interrupted("the search was interrupted")
        return ""

    calls: list[CandidateRun] = []
    with pytest.raises(Interrupted):
        search(tmp_path, fake_training(7, calls, cut_off))
    begun = {run.run_dir: run.values for run in calls}
    _, found = search(tmp_path, fake_training(7, again := []))
    values = {run.run_dir: run.values for run in again}
    assert begun.items() <= values.items()
    assert len(found) == 9
    # What was told to Optuna once is told once.
    _, same = search(tmp_path, fake_training(7, []))
    assert [each.values for each in same] == [each.values for each in found]


@needs_optuna
def test_later_rounds_come_near_the_best_of_the_earlier_ones(tmp_path: Path) -> None:
    request = SearchRequest("quickstart", REQUEST.search, candidates=12, rounds=3, seeds=[0], steps=9)
    _, found = search(tmp_path, fake_training(20, []), request)
    distances = {each.number: abs(each.values["staleness.limit"] - 20) for each in found}
    numbers = sorted(distances)
    first = numbers[:12]
    last = numbers[24:]
    assert sum(distances[each] for each in last) < 0.6 * sum(distances[each] for each in first)


@needs_optuna
def test_what_fails_is_last_and_says_why(tmp_path: Path) -> None:
    calls: list[CandidateRun] = []
    fails = fake_training(7, calls, lambda run: "no memory" if "candidate-2/" in str(run.run_dir) else "")
    _, found = search(tmp_path, fails)
    assert found[-1].number == 2
    assert found[-1].failure == f"no memory ({tmp_path}/candidate-2/seed-3.log)"
    assert len(found) == 9
    with pytest.raises(ConfigError, match="own values cannot be trained: no memory"):
        search(tmp_path / "other", fake_training(7, [], lambda run: "no memory"))


@needs_optuna
def test_a_small_space_has_no_more_candidates_than_values(tmp_path: Path) -> None:
    request = SearchRequest("quickstart", ["staleness.limit=1,2"], candidates=9, seeds=[0], steps=9)
    _, found = search(tmp_path, fake_training(2, []), request)
    assert [each.values["staleness.limit"] for each in found] == [2, 1]


@needs_optuna
def test_a_directory_goes_on_with_its_own_search_only(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    for wanted in (REQUEST, None, REQUEST):
        with open_search(folder, wanted) as (_, kept):
            assert (list(kept.seeds), kept.steps, list(kept.search)) == ([3, 4], 18, list(REQUEST.search))

    def problem(path: Path, wanted: SearchRequest | None) -> str:
        with pytest.raises(ConfigError) as found, open_search(path, wanted):
            pass
        return str(found.value)

    assert "holds a search with steps = 18, not 30" in problem(folder, replace(REQUEST, steps=30))
    assert "is not empty, and holds no search" in problem(tmp_path, REQUEST)
    assert "holds no search" in problem(tmp_path / "none", None)
    with open_search(folder, None):
        assert "another process works on the search" in problem(folder, None)
    (folder / "candidates.log").write_text('{"op_code": 0, "wor\n{}\n')
    assert "is damaged" in problem(folder, None)


def candidate(number: int, mean: float, differences: list[float]) -> SearchCandidate:
    scores = dict(enumerate(mean + each for each in differences))
    found = paired(scores, dict.fromkeys(scores, 0.5))
    return SearchCandidate(number, {"staleness.policy": "drop"}, 18, scores, found, 0.1)


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        ([0.1, 0.11, 0.12], "candidate 4 is better by"),
        ([0.1, -0.11, 0.12], "no candidate is clearly better"),
        ([0.1], "one seed cannot tell that from chance"),
    ],
)
def test_the_conclusion_says_what_the_seeds_allow(differences: list[float], sentence: str) -> None:
    found = [candidate(4, 0.5, differences)]
    text = conclusion(REQUEST, found)
    assert sentence in text
    assert ("--staleness.policy drop --seed 5" in text) == (sentence == "candidate 4 is better by")


def test_the_table_is_narrow_and_names_failures() -> None:
    failed = SearchCandidate(2, {"staleness.policy": "mask"}, 2, failure="no memory (log)")
    shown = table(REQUEST, SearchCandidate(0, {}, 18, {3: 0.5}), [candidate(4, 0.5, [0.1, 0.3]), failed])
    assert max(map(len, shown)) <= 80
    assert "failed: no memory" in "\n".join(shown)
    assert "+0.2 ± 0.1" in "\n".join(shown)


@needs_optuna
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an experiment"),
        (["quickstart"], "name what to search"),
        (["quickstart", "--search", "staleness.limit=0..4", "--keep", "1"], "one candidate in 2"),
        (["quickstart", "--search", "staleness.limit=0..4", "--candidates", "1"], "needs two at least"),
        (["quickstart", "--search", "staleness.limit=-1..4"], "staleness.limit"),
        (["quickstart", "--search", "staleness.limit=0..4", "--metric", "rewards"], "no metric 'rewards'"),
        (["quickstart", "--search", "staleness.limit=0..4", "--metric", "reward/meen"], "did you mean reward/mean"),
        (["quickstart", "--search", "steps=2,4"], "compared after the same steps"),
        (["quickstart", "--search", "staleness.limit=0..4", "--staleness.limit", "1"], "is set by a flag too"),
        (["--to", "somewhere", "--stop-at", "8"], "goes on as it began: write --to alone"),
        (["quickstart", "--search", "staleness.limit=0..4", "--to", "/dev/null/search"], "cannot be used"),
        (["nowhere", "--search", "staleness.limit=0..4"], "nowhere"),
    ],
)
def test_mistakes_end_before_anything_is_written(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@needs_optuna
def test_values_that_are_right_together_only_are_searched() -> None:
    together = ["--search", "algorithm.correction=none,cap", "--search", "algorithm.old_logprobs=engine,recomputed"]
    asked = tune._parser().parse_args(["quickstart", *together])
    request = tune._request(asked, [])
    assert not request.problem({"algorithm.correction": "cap", "algorithm.old_logprobs": "recomputed"})
    assert request.problem({"algorithm.correction": "cap", "algorithm.old_logprobs": "engine"})
    alone = tune._parser().parse_args(["quickstart", *together[:2]])
    with pytest.raises(ConfigError, match=r"--search algorithm\.correction"):
        tune._request(alone, [])


@needs_optuna
def test_combinations_that_the_config_refuses_become_no_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SearchRequest, "problem", lambda _, values: "" if values["staleness.limit"] > 6 else "no")
    request = replace(REQUEST, search=["staleness.limit=0..9"])
    with open_search(tmp_path, request) as (study, _):
        found = Search(tmp_path, request, study, lambda run: "", lambda text: None).proposed(0)
    assert sorted(each.values["staleness.limit"] for each in found) == [7, 8, 9]


@pytest.mark.parametrize(
    ("codes", "failure", "tries"), [([1, 0], "", 2), ([1, 1, 0], "it broke", 2), ([2, 0], "it broke", 1)]
)
def test_a_run_that_fails_goes_on_once_unless_its_config_is_wrong(
    codes: list[int], failure: str, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    run = CandidateRun("quickstart", tmp_path / "run", 4, [], {})
    (tmp_path / "run").mkdir()

    def once(request: CandidateRun) -> int:
        done.append(codes.pop(0))
        if done[-1]:
            request.output.write_text("step 1\nasyncrl: it broke\n")
        else:
            (tmp_path / "run/metrics.jsonl").write_text('{"step": 4}\n')
        return done[-1]

    monkeypatch.setattr(tuning_search, "_run_once", once)
    assert tuning_search.run_trial(run) == failure
    assert len(done) == tries


def test_a_run_waits_for_the_one_that_a_killed_search_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    ended = threading.Event()

    def flock(lock: IO[str], operation: int) -> None:
        with pytest.raises(BlockingIOError):
            real(lock, operation | fcntl.LOCK_NB)
        ended.set()
        real(lock, operation)

    def hold(file: IO[str]) -> None:
        with file:
            assert ended.wait(60)

    class Child:
        def __init__(self, *_: object, **__: object) -> None:
            begun.append(ended.is_set())

        def wait(self) -> int:
            return 0

    real = fcntl.flock
    orphan = open(tmp_path / "run.lock", "a+")  # noqa: SIM115
    real(orphan, fcntl.LOCK_EX)
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("subprocess.Popen", Child)
    holder = threading.Thread(target=hold, args=(orphan,))
    holder.start()
    assert tuning_search._run_once(CandidateRun("quickstart", tmp_path, 4, [], {})) == 0
    holder.join()
    assert begun == [True]


# Sequential halving: steps of each rung, scores, comparisons in pairs, and who goes on.
def test_rungs_keep_one_in_three_and_end_with_all_steps() -> None:
    assert rungs(9, 3, 250) == [(28, 9), (84, 3), (250, 1)]
    assert rungs(4, 2, 16) == [(4, 4), (8, 2), (16, 1)]
    assert rungs(2, 3, 10) == [(10, 2)]


@given(st.integers(1, 200), st.integers(2, 9), st.integers(1, 10_000))
def test_rungs_get_longer_with_fewer_candidates(candidates: int, keep: int, steps: int) -> None:
    found = rungs(candidates, keep, steps)
    assert found[0][1] == candidates
    assert found[-1][0] == steps
    assert found[-1][1] < keep
    for before, after in pairwise(found):
        assert before[0] <= after[0]
        assert after[1] == before[1] // keep


def lines(*rewards: float | None) -> list[dict[str, float | None]]:
    return [{"step": number, "reward/mean": reward} for number, reward in enumerate(rewards, 1)]


def test_a_score_is_the_mean_of_the_last_fourth() -> None:
    assert score(lines(0, 0, 0, 0, 0, 0, 0.25, 0.75), "reward/mean", 8) == 0.5
    assert score(lines(0, 0, 1, 0.5), "reward/mean", 3) == 1
    assert score(lines(1), "reward/mean", 1) == 1


@pytest.mark.parametrize("rewards", [(), (1.0,), (1.0, None), (1.0, math.nan), (1.0, math.inf)])
def test_there_is_no_score_without_finite_numbers_of_all_steps(rewards: tuple[float | None, ...]) -> None:
    assert score(lines(*rewards), "reward/mean", 2) is None
    assert score(lines(1, 1), "critic/loss", 2) is None


def test_differences_are_those_of_each_seed() -> None:
    found = paired({0: 0.5, 1: 0.9}, {0: 0.4, 1: 0.8, 2: 0.1})
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.is_clear
    less = paired({0: 0.5, 1: 0.9}, {0: 0.4, 1: 0.6}, sign=-1)
    assert less is not None
    assert less.mean == pytest.approx(-0.2)
    assert less.error == pytest.approx(0.1)
    assert str(less) == "-0.2 ± 0.1"
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_is_never_clear() -> None:
    found = paired({0: 0.5}, {0: 0.0})
    assert found == PairedDifference(0.5, None)
    assert not found.is_clear
    assert not PairedDifference(0.2, 0.1).is_clear


# The values of a search as they are typed, and mistakes in them.


RATE = "training.learning_rate"


def parse_dimension(text: str) -> Dimension:
    (found,) = parse_space([text])
    return found


def is_range(found: Dimension, expected: Any) -> bool:
    return bool(found.distribution == expected) and found.ends == (expected.low, expected.high)


@needs_optuna
def test_ranges_and_choices() -> None:
    distributions = optuna().distributions
    rates = distributions.FloatDistribution(1e-5, 1e-3, log=True)
    assert is_range(parse_dimension(f"{RATE}=1e-5..1e-3:log"), rates)
    assert is_range(parse_dimension("staleness.limit=0..4"), distributions.IntDistribution(0, 4))
    assert parse_dimension("staleness.policy=mask,drop").choices == ("mask", "drop")
    assert parse_dimension("training.gradient_checkpointing=true,false").choices == (True, False)
    assert parse_dimension(f"{RATE}=1e-4,3e-4").ends == (1e-4, 3e-4)
    assert parse_dimension("training.betas=[0.9, 0.99],[0.8, 0.9]").choices == ([0.9, 0.99], [0.8, 0.9])
    assert parse_dimension("task.prompts=../a.jsonl,../b.jsonl").choices == ("../a.jsonl", "../b.jsonl")
    assert parse_dimension('task.system="one, two",three').choices == ('"one', ' two"', "three")
    assert parse_dimension('task.system="one, two","three"').choices == ("one, two", "three")


@needs_optuna
def test_values_can_be_typed_again() -> None:
    assert parse_dimension(f"{RATE}=1e-5..1e-3:log").of(0.000123456) == 0.000123
    assert parse_dimension("staleness.policy=mask,drop").of(1) == "drop"
    assert parse_dimension("staleness.limit=0..4").of(3) == 3


@needs_optuna
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RATE, "write KEY=LOW..HIGH"),
        (f"{RATE}=", "write KEY=LOW..HIGH"),
        ("training.learning_rat=1..2", "did you mean training.learning_rate"),
        ("staleness.policy=1..2", "two different values"),
        ("seed=3,4", "all candidates have the same seeds"),
        ("steps=2,4", "compared after the same steps"),
        (f"{RATE}=1..2:square", "no scale 'square'"),
        ("staleness.limit=0.5..2", "must be integers"),
        (f"{RATE}=a..b", "must be numbers"),
        (f"{RATE}=2..1", "below the second"),
        (f"{RATE}=0..1:log", "begins above 0"),
        ("staleness.policy=mask,mask", "two different values"),
    ],
)
def test_mistakes_say_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_dimension(text)


@needs_optuna
def test_a_key_is_given_once() -> None:
    with pytest.raises(ConfigError, match=f"{RATE} is given twice"):
        parse_space([f"{RATE}=1..2", f"{RATE}=2..3"])
