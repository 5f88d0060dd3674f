"""Whole fleets take what `asyncrl plan` predicts: rows in shared memory, and each process."""

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.deploy.checks.memory_needs import NO_WORKERS, planned_workers, shared_memory
from asyncrl.deploy.checks.run_prompts import measured_lengths
from asyncrl.engines.models.model_shape import shape_of

sys.path.insert(0, str(Path(__file__).parent))
from programs import ForkedProgram
from watching import PATIENCE, wait_until, workers_of

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

ROWS = 2.0
SHORT_ANSWERS = 3.5
TRAINED = 1.6
OTHERS = 1.6
"""Largest factors between prediction and measurement: of rows, of rows whose answers end long before
generation.max_new_tokens as the prediction counts them, of trainers and critics, of other processes. A few steps take
less than many, and what malloc keeps depends on the load; docs/log.md has what longer runs took."""
TORCH = ("training", "critic", "generation", "evaluation")
FLEETS: dict[str, tuple[str, list[str]]] = {
    "quickstart": ("quickstart", []),
    "longer": ("longer", []),
    "critic and reward model": ("quickstart", ["--algorithm.preset", "ppo", "--algorithm.kl", "0.01"]),
    "adapters": ("quickstart", ["--model.lora.rank", "8"]),
}


class Taken:
    """Looks at a run while it goes on. rows: most bytes of shared memory of all stores. peaks: most resident bytes of
    each process by its name, as the kernel counts them."""

    def __init__(self, run_dir: Path) -> None:
        self.rows = 0
        self.peaks: dict[str, int] = {}
        self._run_dir = run_dir

    def look(self) -> None:
        stores = Path("/dev/shm").glob(f"asyncrl-{self._start()}-*.rows")
        with suppress(FileNotFoundError):
            self.rows = max(self.rows, sum(512 * path.stat().st_blocks for path in stores))
        for (service, replica, rank), pid in workers_of(self._run_dir).items():
            with suppress(FileNotFoundError, ProcessLookupError):
                if found := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
                    self.peaks[f"{service}{replica}.{rank}"] = 1024 * int(found[1])

    def _start(self) -> str:
        with suppress(FileNotFoundError):
            return (self._run_dir / "run.start").read_text().partition(" ")[0]
        return "none"


def judge(model: Path, folder: Path) -> Path:
    """Makes a reward model of the policy, with a head that gives one number."""
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


def measured(config_flags: list[str], experiment: str, run_dir: Path) -> Taken:
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", experiment, "--run-dir", str(run_dir), *config_flags]
    taken = Taken(run_dir)
    with ForkedProgram(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:

            def ended() -> bool:
                taken.look()
                return process.poll() is not None

            wait_until(ended, "the end of the run", PATIENCE)
        finally:
            process.kill()
        shown = process.communicate(timeout=20)[0]
    assert process.returncode == 0, shown
    return taken


def predicted(config: Config) -> tuple[int, dict[str, int]]:
    model = config.model.name
    shape = shape_of(model)
    lengths = measured_lengths(config, model)
    assert shape is not None
    assert lengths.rows > 0, "the prompts and the model are here, so their tokens are counted"
    planned = (worker for worker in planned_workers(config, shape, lengths) if worker.name not in NO_WORKERS)
    workers = {worker.name: worker.likely for worker in planned}
    return shared_memory(config, shape, lengths=lengths).likely_rows, workers


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_fleet_takes_what_is_predicted(fleet: str, quickstart_model: Path, tmp_path: Path) -> None:
    experiment, more = FLEETS[fleet]
    flags = ["--model.name", str(quickstart_model), "--steps", "8", "--training.checkpoint_every", "0", *more]
    if "ppo" in more:
        flags += ["--reward.model", str(judge(quickstart_model, tmp_path / "judge"))]
    flags += ["--evaluate.every", "100"]
    rows, workers = predicted(load(experiment, flags).config)
    taken = measured(flags, experiment, tmp_path / "run")
    sys.stderr.write(f"{fleet}: rows {rows} for {taken.rows}, {rows / taken.rows:.2f}\n")
    assert 1 / ROWS <= rows / taken.rows <= (SHORT_ANSWERS if fleet == "longer" else ROWS)
    assert set(workers) == set(taken.peaks)
    for name, size in workers.items():
        factor = size / taken.peaks[name]
        kind = name.rstrip("0123456789.")
        sys.stderr.write(f"{fleet}: {name} {size >> 20} MB for {taken.peaks[name] >> 20}, {factor:.2f}\n")
        bound = TRAINED if kind in ("training", "critic") else OTHERS
        assert kind not in TORCH or 1 / bound <= factor <= bound, f"{name}: {size} for {taken.peaks[name]}"
