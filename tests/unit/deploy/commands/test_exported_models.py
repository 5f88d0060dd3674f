"""What leaves a run: precision, modes, base model of adapters, and the card of an exported model."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from asyncrl.config.schema import Config
from asyncrl.deploy import cli
from asyncrl.deploy.commands.export import export
from tests import golden
from tests.unit.deploy.commands.committed_run import committed_run

WEIGHTS = {"embed.weight": torch.linspace(-1, 1, 7), "steps": torch.arange(3)}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MakeRun = Callable[..., Path]


@pytest.fixture
async def make_run(tmp_path: Path) -> Callable[..., Any]:
    """make_run(name, adapters=False, more={}, **model) -> directory of a run with a checkpoint of version 0. more:
    further files of its model."""

    async def make(
        name: str = "m", *, adapters: bool = False, algorithm: Any = None, more: Any = None, **model: Any
    ) -> Path:
        sections = {"model": {"name": name, **model}, "algorithm": algorithm or {}, "task": {"prompts": "p"}}
        config = Config.model_validate({"name": "words", "steps": 30, **sections})

        def write(checkpoint: Path) -> None:
            folder = checkpoint / "model"
            folder.mkdir()
            described = {"model_type": "llama", "dtype": "bfloat16"}
            file = "model.safetensors"
            if adapters:
                described = {"base_model_name_or_path": str(tmp_path / "run" / "model"), "r": 4}
                file = "adapter_model.safetensors"
            save_file(WEIGHTS, folder / file)
            (folder / file).chmod(0o600)
            (folder / ("adapter_config.json" if adapters else "config.json")).write_text(json.dumps(described))
            for other, content in (more or {}).items():
                (folder / other).write_text(json.dumps(content))

        return await committed_run(tmp_path / "run", config, write)

    return make


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def front_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns the metadata of a card, and its text."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.mark.parametrize(
    ("adapters", "dtype", "flags", "wanted"),
    [
        (False, "float32", [], torch.float32),
        (True, "bfloat16", [], torch.bfloat16),
        (True, "bfloat16", ["--dtype", "float32"], torch.float32),
        (False, "bfloat16", ["--dtype", "float16"], torch.float16),
        (False, "float32", ["--dtype", "bfloat16"], torch.bfloat16),
    ],
)
async def test_weights_leave_in_the_precision_of_the_run_or_of_the_flag(
    make_run: Callable[..., Any], tmp_path: Path, adapters: bool, dtype: str, flags: list[str], wanted: torch.dtype
) -> None:
    run = await make_run(adapters=adapters, dtype=dtype, lora={} if adapters else None)
    assert cli.main(["export", str(run), str(tmp_path / "out"), *flags]) == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    found = load_file(file)
    assert found["embed.weight"].dtype == wanted
    assert torch.equal(found["embed.weight"], WEIGHTS["embed.weight"].to(wanted))
    assert torch.equal(found["steps"], WEIGHTS["steps"])
    if not adapters:
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(wanted).removeprefix("torch.")


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
async def test_weights_that_a_checkpoint_links_to_leave_in_the_precision_that_was_asked_for(
    make_run: Callable[..., Any], tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    run = await make_run()
    base = tmp_path / "base.safetensors"
    file = run / "checkpoints" / "0" / "model" / "model.safetensors"
    weights = {"embed.weight": WEIGHTS["embed.weight"].to(stored), "steps": WEIGHTS["steps"]}
    save_file(weights, base)
    base.chmod(0o400)
    file.unlink()
    file.symlink_to(base)
    manifest = json.loads((file.parents[1] / "manifest.json").read_text())
    manifest["files"]["model/model.safetensors"] = sha256(base.read_bytes()).hexdigest()
    (file.parents[1] / "manifest.json").write_text(json.dumps(manifest))
    before = base.read_bytes()
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--dtype", str(wanted).removeprefix("torch.")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["embed.weight"].dtype == wanted
    assert torch.equal(found["embed.weight"], weights["embed.weight"].to(wanted))
    assert torch.equal(found["steps"], WEIGHTS["steps"])
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()
    assert base.read_bytes() == before, "what the run began with stays as it is"


@pytest.mark.parametrize("mask", [0o022, 0o077])
async def test_all_files_have_the_mode_that_the_umask_says(
    make_run: Callable[..., Any], tmp_path: Path, mask: int
) -> None:
    run = await make_run(dtype="bfloat16")
    with umask(mask):
        export(run, tmp_path / "out")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~mask}


@pytest.mark.parametrize("revision", ["", "v2"])
async def test_adapters_name_the_model_of_the_hub_and_its_commit(
    make_run: Callable[..., Any], tmp_path: Path, revision: str
) -> None:
    run = await make_run("owner/tiny", adapters=True, lora={}, revision=revision)
    (run / "hub.json").write_text(json.dumps({f"owner/tiny@{revision}" if revision else "owner/tiny": COMMIT}))
    for public in (False, True):
        export(run, tmp_path / f"out{public}", public=public)
        described = json.loads((tmp_path / f"out{public}" / "adapter_config.json").read_text())
        assert described == {"base_model_name_or_path": "owner/tiny", "revision": COMMIT, "r": 4}
        front, text = front_of(tmp_path / f"out{public}")
        assert (front["base_model"], front["library_name"]) == ("owner/tiny", "peft")
        assert f"[owner/tiny](https://huggingface.co/owner/tiny) at {COMMIT}" in text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("{}/mine", "mine"),
        ("~/mine", "mine"),
        ("warmed:{}/rows.py:ROWS", "warmed:rows.py:ROWS"),
        ("warmed:reverse", "warmed:reverse"),
        ("pypi:smollm2", "pypi:smollm2"),
    ],
)
async def test_what_is_published_names_no_path_of_the_machine(
    make_run: Callable[..., Any], tmp_path: Path, name: str, shown: str
) -> None:
    custom = {"custom": f"{tmp_path}/mine.py:ALGORITHM"}
    run = await make_run(name.format(tmp_path), adapters=True, lora={}, algorithm=custom)
    export(run, tmp_path / "public", public=True)
    everything = b"".join(path.read_bytes() for path in (tmp_path / "public").iterdir())
    assert str(tmp_path).encode() not in everything
    described = json.loads((tmp_path / "public" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == shown
    front, text = front_of(tmp_path / "public")
    assert "base_model" not in front
    assert f"| base model | {shown} |" in text
    assert "| algorithm | mine.py:ALGORITHM |" in text
    export(run, tmp_path / "own")
    described = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(run / "model"), "here it loads from the folder"


async def test_a_card_says_what_was_trained_and_how_well(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = await make_run("owner/tiny", algorithm={"preset": "rloo"})
    (run / "hub.json").write_text(json.dumps({"owner/tiny": COMMIT}))
    results = [
        {"version": 0, "name": name, "mean": mean, "stderr": 0.01, "prompts": 64}
        for name, mean in (("", 0.5), ("hard", 0.25))
    ]
    others = [{"version": 7, "name": "", "mean": 0.9, "stderr": 0.01, "prompts": 64}]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (*results, *others)))
    export(run, tmp_path / "out")
    _, text = front_of(tmp_path / "out")
    golden.says((tmp_path / "out" / "README.md").read_text(), "0.500 ± 0.010", "0.250 ± 0.010", "pipeline_tag")
    assert "0.900" not in text, "that is of another version"


async def test_an_export_ends_answers_where_the_run_did(make_run: Callable[..., Any], tmp_path: Path) -> None:
    template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    added = [{"id": number, "content": text, "special": True} for number, text in enumerate(("<eos>", "<|end|>"))]
    more = {
        "tokenizer_config.json": {"chat_template": template, "eos_token": "<eos>"},
        "tokenizer.json": {"model": {"vocab": {"a": 2}}, "added_tokens": added},
        "generation_config.json": {"eos_token_id": 0, "top_p": 0.9},
    }
    export(await make_run(more=more), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": [0, 1],
        "top_p": 0.9,
    }
