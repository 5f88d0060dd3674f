"""A tiny model is made once: kept by the digest of what it is made from, whoever else makes it or dies half way."""

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.engines.models import model_preparation, warmed_model_cache, warmed_up_model
from asyncrl.engines.models.model_preparation import make_model
from asyncrl.engines.models.warmed_model_cache import (
    BATCH,
    DIGESTS,
    HEADS,
    MOST,
    UNFINISHED,
    WarmedModelCache,
    recipe_digest,
)
from asyncrl.tasks.builtin.words import Demonstrations

QUICK = (
    "from asyncrl.tasks.builtin.words import Demonstrations\nQUICK = Demonstrations({draw}, words=('say ',), steps=2)\n"
)
Make = Callable[..., tuple[dict[str, bytes], list[str]]]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "asyncrl" / "warmed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder to keep."""
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text("{}")
    return found


@pytest.fixture
def make(home: Path, tmp_path: Path) -> Make:
    """make(seed, draw) -> files of a model, and the lines shown while it was made."""

    def made(seed: int = 0, draw: str = "lambda source: ('say 1:', str(source.randint(0, 9)))") -> tuple:
        number = time.monotonic_ns()
        lines = list[str]()
        file = tmp_path / f"quick{number}.py"
        target = tmp_path / f"model{number}"
        file.write_text(QUICK.format(draw=draw))
        make_model(f"warmed:{file}:QUICK", seed, target, lines.append)
        return files(target), lines

    return made


def test_the_second_run_gets_the_model_of_the_first_without_torch(
    make: Make, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, lines = make()
    assert lines[0].startswith("warming up")
    monkeypatch.setattr(warmed_up_model, "warm_up", None)
    second, lines = make()
    assert second == first
    assert DIGESTS not in second
    (entry,) = (path for path in home.iterdir() if path.is_dir())
    assert lines == [f"the tiny model was made before: {entry}"]
    assert set(json.loads((entry / DIGESTS).read_text())) == set(first)


def test_another_seed_demonstration_or_shape_is_another_model(make: Make, home: Path) -> None:
    models = [make()[0], make(seed=1)[0], make(draw="lambda source: ('say 2:', '2')")[0]]
    assert len({each["model.safetensors"] for each in models}) == len(models)
    assert len([path for path in home.iterdir() if path.is_dir()]) == len(models)
    one = Demonstrations(lambda source: ("a", str(source.random())), steps=1)
    assert recipe_digest(one, 0, HEADS) == recipe_digest(one, 0, HEADS) != recipe_digest(one, 0, HEADS + 1)
    last = iter([*["b"] * (2 * BATCH - 1), "c"])
    others = [
        Demonstrations(lambda source: ("a", "b"), steps=2),
        Demonstrations(lambda source: ("a", next(last)), steps=2),
    ]
    assert len({recipe_digest(each, 0, HEADS) for each in others}) == 2, "the last demonstration counts too"


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "undescribed"])
def test_a_model_that_is_not_what_was_kept_is_made_again(damage: str, make: Make, home: Path) -> None:
    first, _ = make()
    (entry,) = (path for path in home.iterdir() if path.is_dir())
    weights = entry / "model.safetensors"
    if damage == "cut":
        os.truncate(weights, 1000)
    elif damage == "changed":
        *others, last = weights.read_bytes()
        weights.write_bytes(bytes([*others, last ^ 1]))
    else:
        (weights if damage == "gone" else entry / DIGESTS).unlink()
    for expected in ("warming up", "the tiny model was made before"):
        again, lines = make()
        assert again == first
        assert lines[0].startswith(expected)


def test_runs_that_make_it_at_once_keep_one(tmp_path: Path, model: Path) -> None:
    cache = WarmedModelCache(tmp_path / "kept")
    together = threading.Barrier(4, timeout=30)
    targets = [tmp_path / str(number) for number in range(4)]

    def run(target: Path) -> None:
        target.mkdir()
        together.wait()
        cache.keep("abc", model)
        assert cache.copy_to("abc", target)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [files(target) for target in targets] == [{"config.json": b"{}"}] * 4
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["abc"]


def test_an_unfinished_folder_that_another_removes_meanwhile_is_no_error(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / "kept" / "making-other"
    unfinished.mkdir(parents=True)
    used_at = warmed_model_cache._used_at

    def vanish(path: Path) -> float:
        if path == unfinished and path.exists():
            path.rmdir()
        return used_at(path)

    monkeypatch.setattr(warmed_model_cache, "_used_at", vanish)
    cache = WarmedModelCache(tmp_path / "kept")
    cache.keep("abc", model)
    assert not unfinished.exists()
    assert cache.copy_to("abc", tmp_path)


def test_a_model_that_another_removes_while_it_is_copied_is_made_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = WarmedModelCache(tmp_path / "kept")
    cache.keep("abc", model)
    monkeypatch.setattr(os, "utime", lambda entry: shutil.rmtree(entry))
    made = list[int]()
    (tmp_path / "made").mkdir()
    model_preparation._made_once(cache, "abc", "it", tmp_path / "made", lambda line: None, lambda: made.append(1))
    assert made == [1]


def test_one_killed_in_mid_write_leaves_nothing_that_counts(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    cache = WarmedModelCache(kept)
    with monkeypatch.context() as killed:  # A killed process runs no clean-up either.
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        killed.setattr(warmed_model_cache, "sync_to_disk", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache.keep("abc", model)
    (left,) = kept.iterdir()
    assert not cache.copy_to("abc", tmp_path)
    cache.keep("abc", model)
    assert left.exists(), "it may be that of a process at work"
    long_ago = time.time() - 2 * UNFINISHED
    os.utime(left, (long_ago, long_ago))
    cache.keep("def", model)
    assert sorted(path.name for path in kept.iterdir()) == ["abc", "def"]


def test_what_was_unused_for_longest_goes(tmp_path: Path, model: Path) -> None:
    kept = tmp_path / "kept"
    random_order = list(range(MOST))
    cache = WarmedModelCache(kept)
    for number in range(MOST):
        cache.keep(str(number), model)
    random.Random(3).shuffle(random_order)
    for age, number in enumerate(random_order):
        os.utime(kept / str(number), (1000 - age, 1000 - age))
    target = tmp_path / "target"
    target.mkdir()
    assert cache.copy_to(str(random_order[-1]), target), "using one makes it young"
    cache.keep("new", model)
    gone = {str(number) for number in range(MOST)} - {path.name for path in kept.iterdir()}
    assert gone == {str(random_order[-2])}


def test_a_cache_that_cannot_be_written_costs_only_time(make: Make, home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("a file where the folder would be")
    model, lines = make()
    assert "model.safetensors" in model
    assert lines[-1].startswith("the tiny model is not kept for later runs: ")
