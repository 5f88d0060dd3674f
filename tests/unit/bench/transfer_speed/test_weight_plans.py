import json
import struct
from math import prod
from pathlib import Path

import pytest

from asyncrl.bench.transfer_speed.weight_plans import MODELS, main, planned_model

PUBLISHED = {
    "qwen2.5-0.5b": (290, 494_032_768),
    "qwen2.5-7b": (339, 7_615_616_512),
    "qwen2.5-72b": (963, 72_706_203_648),
    "llama-3.1-8b": (291, 8_030_261_248),
    "qwen3-30b-a3b": (18867, 30_532_122_624),
}
"""Tensors and parameters of the published checkpoints."""


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_number_of_tensors_and_parameters(name: str) -> None:
    tensors, _ = planned_model(name)
    assert (len(tensors), sum(prod(tensor.shape) for tensor in tensors)) == PUBLISHED[name]


def test_a_plan_is_printed_with_bytes_senders_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--plan", "fsdp8", "tp2.dp4", "--link", "50GB/s", "--link", "tcp10g", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "qwen2.5-7b: 339 tensors, 15.231 GB" in printed
    assert "60.927 GB, bound 60.927 GB: 1.0000 of it" in printed
    assert "8; the largest sends 7.616 GB, 1.0000 of the mean; no plan has less than 7.616 GB" in printed
    assert "over 50GB/s" in printed
    assert "at least 0.1523 s" in printed
    assert "at least 6.093 s" in printed
    assert "  met     bytes moved over the bound: 1, goal at most 1\n" in printed
    assert "  met     largest sender over the mean: 1, goal at most 1.05\n" in printed
    assert ", goal at most 100\n" in printed


def test_colocated_ranks_copy_what_they_hold(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--plan", "tp4.dp2", "tp2.dp4", "--colocated", "strided", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "30.462 GB, bound 30.462 GB" in printed
    assert "the largest receives 3.808 GB" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plan", "fsdp8", "x"], "layout 'x': 'x' is none of dp, pp, fsdp, zero, ep, tp with a size"),
        (["--plan", "fsdp8", "tp2", "--link", "fast"], "'fast' is no link: name one of nvlink"),
        (["--plan", "fsdp8", "tp2", "--link", "0GB/s"], "'0GB/s' is no link"),
        (["--plan", "fsdp8", "tp2", "--model", "gpt9"], "'gpt9' is no model: name one of qwen2.5-0.5b"),
        (["--plan", "ep4", "tp2"], "ep4 would spread experts over ranks, and the model has none: leave it out"),
        (["--plan", "ep3", "tp2", "--model", "qwen3-30b-a3b"], "ep3 must divide the number of experts, which is 128"),
        (["--plan", "tp8", "tp2"], "tp8 would cut through heads"),
    ],
)
def test_mistakes_are_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def write_safetensors(file: Path, header: dict[str, dict[str, object]]) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_folder_gives_shapes_and_dtypes_of_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4}))
    write_safetensors(
        tmp_path / "model-1.safetensors", {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [4, 2]}}
    )
    write_safetensors(tmp_path / "model-2.safetensors", {"b": {"dtype": "BF16", "shape": []}})
    tensors, sizes = planned_model(str(tmp_path))
    assert [(tensor.name, tensor.shape, tensor.bytes) for tensor in tensors] == [("a", (4, 2), 32), ("b", (), 2)]
    assert (sizes.layers, sizes.heads, sizes.kv_heads, sizes.experts) == (2, 4, 4, 0)


def test_a_damaged_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors", {"a": {"dtype": "I64", "shape": [4]}})
    with pytest.raises(ValueError, match="has no 'num_attention_heads'"):
        planned_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4}))
    with pytest.raises(ValueError, match=r"a of .* has dtype I64"):
        planned_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(ValueError, match="is no safetensors file"):
        planned_model(str(tmp_path))
