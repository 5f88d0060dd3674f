"""kill -9 of a rank at a point of a step: the other one finds out at its next exchange and raises PeerLost, which ends
its process; none hangs, and none goes on alone. `-s` prints the table."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from asyncrl.config.schema import Config
from tests.unit.engines.training.ranks import killed_process
from tests.unit.engines.training.ranks.killed_process import LAYOUTS, POINTS, Death

NEXT = {
    "rows": ("rows",),
    "forward": ("step",),
    "backward": ("step",),
    "optimizer": ("step",),
    "publish": ("publish", "checkpoint"),
    "checkpoint": ("checkpoint",),
}
"""What the survivor does when it finds out. Copies of whole weights exchange nothing to publish."""
LAYOUTS_AND_POINTS = zip(("dp", "shard", "pp", "ep", "tp", "shard"), POINTS, strict=True)
ONE_OF_EACH = [(layout, number % 2, point) for number, (layout, point) in enumerate(LAYOUTS_AND_POINTS)]
EVERY_ONE = [*product(LAYOUTS, (0, 1), POINTS)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("deaths", [ONE_OF_EACH, pytest.param(EVERY_ONE, marks=pytest.mark.long)], ids=len)
def test_the_other_rank_finds_out_at_its_next_exchange(
    deaths: list[Death], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """An exchange may take an hour: a death is known because the kernel closes the sockets of the dead."""
    training = {"micro_batch_tokens": 64, "logits_chunk": 16}
    config = Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}, "training": training})
    models = {layout: str(make_model("qwen3_moe" if layout == "ep" else "llama")) for layout, *_ in deaths}
    trial = {"models": models, "config": config.model_dump(mode="json", exclude_unset=True), "deaths": deaths}
    (tmp_path / "trial.json").write_text(json.dumps(trial))
    subprocess.run([sys.executable, killed_process.__file__, str(tmp_path)], check=True, timeout=100 * len(deaths))
    for layout, dead, point in deaths:
        name = f"{layout} {dead} {point}"
        codes = json.loads((tmp_path / f"{name}.codes").read_text())
        assert codes == [signal.SIGKILL if rank == dead else 0 for rank in (0, 1)], name
        seen = json.loads((tmp_path / f"{name}.json").read_text())
        sys.stdout.write(f"{name:<20} found in {seen['lost']:<11} {seen['seconds']:.2f} s\n")
        assert seen["lost"] in NEXT[point], name
