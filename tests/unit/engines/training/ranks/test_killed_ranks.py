"""kill -9 of each rank at each point of a step, in each layout of two ranks: the other one finds out at its next
exchange and raises PeerLost, which ends its process; none hangs, and none goes on alone. `-s` prints the table."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import Config
from tests.unit.engines.training.ranks import killed_process
from tests.unit.engines.training.ranks.killed_process import LAYOUTS, POINTS

NEXT = {
    "rows": ("rows",),
    "forward": ("step",),
    "backward": ("step",),
    "optimizer": ("step",),
    "publish": ("publish", "checkpoint"),
    "checkpoint": ("checkpoint",),
}
"""What the survivor does when it finds out. Copies of whole weights exchange nothing to publish."""


@pytest.fixture
def folder(layout: str, make_model: Callable[..., Path], tmp_path: Path) -> Path:
    training = {"micro_batch_tokens": 64, "logits_chunk": 16}
    config = Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}, "training": training})
    trial = {
        "model": str(make_model("qwen3_moe" if layout == "ep" else "llama")),
        "config": config.model_dump(mode="json", exclude_unset=True),
    }
    (tmp_path / "trial.json").write_text(json.dumps(trial))
    return tmp_path


@pytest.mark.timeout(620)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_other_rank_finds_out_at_its_next_exchange(layout: str, folder: Path) -> None:
    """An exchange may take an hour: a death is known because the kernel closes the sockets of the dead."""
    subprocess.run([sys.executable, killed_process.__file__, str(folder), layout], check=True, timeout=600)
    for dead in (0, 1):
        for point in POINTS:
            name = f"{layout} {dead} {point}"
            codes = json.loads((folder / f"{name}.codes").read_text())
            assert codes == [signal.SIGKILL if rank == dead else 0 for rank in (0, 1)], name
            seen = json.loads((folder / f"{name}.json").read_text())
            found = f"{layout:<6} rank {dead} dies at {point:<11} found in {seen['lost']:<11} {seen['seconds']:.2f} s"
            sys.stdout.write(f"{found}\n")
            assert seen["lost"] in NEXT[point], name
