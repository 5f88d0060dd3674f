"""Measures what the process of each rank of a trainer takes while it loads its parts of a model, and of a checkpoint.

Peaks are over what the process had before: all of it, which the kernel keeps, and what is not a page of a file, read
often. Pages of files are mapped for as long as a rank reads from them, and the kernel may take them back.
"""

import argparse
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncrl.bench.end_to_end.packed_rows import INCARNATION, StepShape, rows_of
from asyncrl.bench.end_to_end.rank_processes import run_ranks, write_in_child
from asyncrl.bench.measurements import table
from asyncrl.config.schema import Config
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.shards import own_part
from asyncrl.engines.training.training_step import run_step
from asyncrl.protocols.rank_layout import Layout

LAYOUTS: tuple[dict[str, Any], ...] = ({"dp": 1}, {"shard": 2}, {"tp": 2}, {"pp": 2})
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4}
ROWS = StepShape(8, 8, 4, 1)
STATUS = Path("/proc/self/status")
LOOK = 0.002
"""Seconds between two looks at the memory that is no page of a file."""


@dataclass(slots=True)
class Peak:
    """The most bytes of this process over those before, of all kinds and without pages of files."""

    all: int = 0
    anonymous: int = 0


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser("asyncrl-bench loading-memory", description=__doc__).parse_args(arguments)
    lines = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        model = write_in_child(Path(name) / "model", **SIZES, **HEADS)
        for axes in LAYOUTS:
            layout, text = Layout(**axes), ", ".join(f"{axis} {number}" for axis, number in axes.items())
            folder = Path(name) / text
            run_ranks(layout, partial(write_checkpoint, model, folder))
            for what, load in (("model", load_model), ("checkpoint", load_checkpoint)):
                found = run_ranks(layout, partial(measure, partial(load, model, folder)))
                lines += [_line(text, what, rank, *taken) for rank, taken in enumerate(found)]
    head = ("layout", "loads", "rank", "share, MB", "peak, MB", "over share", "no file, MB", "over share")
    print(table(head, lines))


def _line(layout: str, what: str, rank: int, share: int, peak: int, anonymous: int) -> tuple[str, ...]:
    megabytes = [f"{each / 1e6:.0f}" for each in (share, peak, anonymous)]
    return (
        *(layout, what, str(rank), megabytes[0], megabytes[1], f"{peak / share:.2f}"),
        *(megabytes[2], f"{anonymous / share:.2f}"),
    )


def config_of(model: Path) -> Config:
    sections: dict[str, Any] = {"model": {"name": str(model)}, "task": {"prompts": "none"}}
    return Config.model_validate(sections | {"algorithm": {"preset": "grpo"}})


def write_checkpoint(model: Path, folder: Path, mesh: RankMesh) -> int:
    """Writes the checkpoint of a step, so that there are moments."""
    trainer = PolicyTrainer(config_of(model), model, mesh)
    run_step(trainer, rows_of(ROWS)[mesh.rows.rank :: mesh.rows.size], INCARNATION, 0)
    trainer.save(folder, {})
    return 0


def load_model(model: Path, folder: Path, mesh: RankMesh) -> PolicyTrainer:
    return PolicyTrainer(config_of(model), model, mesh)


def load_checkpoint(model: Path, folder: Path, mesh: RankMesh) -> PolicyTrainer:
    return PolicyTrainer.resume(config_of(model), folder, mesh)[0]


def measure(load: Callable[[RankMesh], PolicyTrainer], mesh: RankMesh) -> tuple[int, int, int]:
    """Returns the bytes of weights and moments that this rank has after a load, and its peaks during it."""
    with watched() as peak:
        trainer = load(mesh)
    held = [own_part(each.detach()) for each in trainer.model.whole.parameters() if not each.is_meta]
    held += [own_part(tensor) for _, tensor, _ in trainer.optimizer.state_tensors()]
    return sum(each.nbytes for each in held), peak.all, peak.anonymous


@contextmanager
def watched() -> Iterator[Peak]:
    """Measures the peaks of the block."""
    torch.zeros(1)
    over, found = threading.Event(), Peak()
    Path("/proc/self/clear_refs").write_text("5")  # The peak that the kernel keeps begins anew (proc(5)).
    before, anonymous = status("VmRSS"), status("RssAnon")

    def look() -> None:
        while not over.wait(LOOK):
            found.anonymous = max(found.anonymous, status("RssAnon") - anonymous)

    thread = threading.Thread(target=look, name="memory")
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.all = status("VmHWM") - before
        found.anonymous = max(found.anonymous, status("RssAnon") - anonymous)


def status(field: str) -> int:
    """Returns the bytes of a field of this process."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert match is not None, f"Linux has {field}"
    return int(match[1]) * 1024
