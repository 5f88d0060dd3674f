"""The trainer's ranks sample themselves: the curve of separate processes, to the last bit, also over a death."""

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parent))
from programs import running, until_step
from watching import pid_of, workers_of

from asyncrl.controller.journal.audit import audit
from asyncrl.telemetry.jsonl import read_lines, read_metrics

pytestmark = [pytest.mark.fleet, pytest.mark.ranks, pytest.mark.usefixtures("programs")]

STEPS = 6
KILLED_AT = 3
START = 300.0
"""Seconds that a run may take on a busy machine: each rank imports what splits layers, for some ten CPU-seconds."""
UNEQUAL = ("time", "perf/", "incarnation", "wall", "staleness/redone/", "weights/")
"""Beginnings of metrics that tell how fast a run was, which start of it, what a death cost, or what ranks gathered."""


def command(
    model: Path, run_dir: Path, *flags: str, axis: str = "tp", ranks: int = 2, steps: int = STEPS, limit: int = 0
) -> list[str]:
    keys = ["--model.name", str(model), "--steps", str(steps), "--staleness.limit", str(limit)]
    keys += [f"--training.layout.{axis}", str(ranks)]
    keys += ["--generation.deterministic", "true", "--training.checkpoint_every", "2", "--evaluate.prompts="]
    keys += ["--training.background_checkpoints", "false"]  # So that a run that dies in step 4 goes on from step 2.
    keys += ["--task.samples_per_prompt", "4", "--task.prompts_per_step", "4", "--fleet.start_deadline", str(START)]
    return [sys.executable, "-m", "asyncrl.deploy.cli", "run", "quickstart", "--run-dir", str(run_dir), *keys, *flags]


def finished(command: list[str]) -> str:
    with running(command) as process:
        shown, _ = process.communicate(timeout=START)
    assert process.returncode == 0, shown
    return shown


def cut_bytes(model: Path) -> int:
    """Bytes of the layers' matrices in float32, which two ranks hold halves of."""
    tensors = load_file(model / "model.safetensors").items()
    return sum(4 * each.size for name, each in tensors if re.search(r"(q|k|v|o|gate|up|down)_proj\.weight$", name))


def whole_bytes(model: Path) -> int:
    return sum(4 * each.size for each in load_file(model / "model.safetensors").values())


def gathered(run_dir: Path) -> dict[str, set[int]]:
    """Bytes that each instance of the trainer's ranks received for a version."""
    found: dict[str, set[int]] = {}
    for path in (run_dir / "logs").glob("training0.*-?-????????.jsonl"):
        lines = [line for line in read_lines(path) if line["event"] == "weights gathered"]
        found[path.stem] = {line["bytes"] for line in lines}
    return found


def transitions(run_dir: Path) -> dict[int, set[tuple[float, float]]]:
    """Bytes received, and held twice, of the steps of each incarnation."""
    found: dict[int, set[tuple[float, float]]] = {}
    for line in read_metrics(run_dir / "metrics.jsonl"):
        pair = line["weights/received_bytes"], line["weights/redundant_bytes"]
        found.setdefault(int(line["incarnation"]), set()).add(pair)
    return found


def sampled(run_dir: Path, rank: int) -> set[int]:
    """Groups whose prompts a rank was given after the death; just before, one takes those of the other."""
    (trace,) = (run_dir / "logs").glob(f"generation{rank}.0-1-*.trace.jsonl")
    spans = [line for line in trace.read_text().splitlines() if '"generate"' in line]
    return {int(found[1]) for span in spans if (found := re.search(r'"group": ?(\d+)', span))}


def curve(run_dir: Path) -> list[Mapping[str, object]]:
    """Metrics of each step; those of the newest start where a step was done again."""
    lines = {line["step"]: line for line in read_metrics(run_dir / "metrics.jsonl")}
    kept = [{name: value for name, value in line.items() if not name.startswith(UNEQUAL)} for line in lines.values()]
    return sorted(kept, key=lambda line: line["step"])


def test_ranks_sample_what_separate_processes_would_and_resume_after_a_death(
    quickstart_model: Path, tmp_path: Path
) -> None:
    apart = tmp_path / "apart"
    together = tmp_path / "together"
    finished(command(quickstart_model, apart))
    colocated = command(quickstart_model, together, "--generation.colocate", "training")
    with running(colocated) as process:
        until_step(process, KILLED_AT)
        workers = workers_of(together)
        assert [workers["training", 0, rank] == workers["generation", rank, 0] for rank in (0, 1)] == [True, True]
        assert not list(Path("/dev/shm").glob(f"asyncrl-{_run_of(together)}-*-weights")), "no version is published"
        os.kill(pid_of(together, "training", 1), signal.SIGKILL)
        shown, _ = process.communicate(timeout=START)
    assert process.returncode == 75, shown
    assert "training0.1 died: killed by SIGKILL" in shown
    assert "resuming" in finished(colocated)
    assert audit(together).ok
    assert curve(together) == curve(apart)
    half = cut_bytes(quickstart_model) / 2
    assert transitions(together) == {0: {(half, 0.0)}, 1: {(half, 0.0)}}, "Table 2 of HybridFlow"
    assert len({line["reward/mean"] for line in curve(apart)}) > 1
    for rank in (0, 1):
        assert sampled(together, rank)
        assert {group % 2 for group in sampled(together, rank)} == {rank}, "THREE_D_ALL_MICRO_DP"
    received = gathered(together)
    assert len(received) == 4, "two ranks, started twice"
    assert set.union(*received.values()) == {cut_bytes(quickstart_model) // 2}


@pytest.mark.parametrize("axis", ["shard", "pp"])
def test_shards_and_stages_sample_what_separate_processes_would(
    axis: str, quickstart_model: Path, tmp_path: Path
) -> None:
    apart = tmp_path / "apart"
    together = tmp_path / "together"
    finished(command(quickstart_model, apart, axis=axis, steps=3))
    finished(command(quickstart_model, together, "--generation.colocate", "training", axis=axis, steps=3))
    assert audit(together).ok
    assert curve(together) == curve(apart)
    received = gathered(together)
    assert len(received) == 2
    assert all(0 < size < whole_bytes(quickstart_model) for sizes in received.values() for size in sizes)
    ((_, redundant),) = transitions(together)[0]
    assert (redundant > 0) == (axis == "shard"), "FSDP2 keeps its shards beside what they are gathered to"
    if axis == "pp":
        staged = ["--generation.colocate", "training", "--generation.layout.pp", "2"]
        finished(command(quickstart_model, stages := tmp_path / "stages", *staged, axis=axis, steps=3))
        assert audit(stages).ok
        assert curve(stages) == curve(apart)
        assert transitions(stages) == {0: {(0.0, 0.0)}}, "each stage samples with the layers that it trains"


IN_GROUPS = ("--generation.colocate", "training", "--generation.layout.tp", "2")
"""Options of a run whose ranks sample two by two."""


def rewards(run_dir: Path) -> list[object]:
    return [line["reward/mean"] for line in curve(run_dir)]


def test_two_ranks_sample_together_and_resume_after_the_death_of_the_second(
    quickstart_model: Path, tmp_path: Path
) -> None:
    """Sums over two ranks are rounded differently, so that samples are equal and their log-probs nearly."""
    apart = tmp_path / "apart"
    together = tmp_path / "together"
    finished(command(quickstart_model, apart, axis="dp", ranks=1, steps=4))
    colocated = command(quickstart_model, together, *IN_GROUPS, steps=4)
    with running(colocated) as process:
        until_step(process, KILLED_AT)
        os.kill(pid_of(together, "training", 1), signal.SIGKILL)
        shown, _ = process.communicate(timeout=START)
    assert process.returncode == 75, shown
    assert "training0.1 died: killed by SIGKILL" in shown
    assert "resuming" in finished(colocated)
    assert audit(together).ok
    assert rewards(together) == rewards(apart)
    assert len(set(rewards(apart))) > 1
    assert transitions(together) == {incarnation: {(0.0, 0.0)} for incarnation in (0, 1)}, "they train these slices"
    traces = {path.name[:13]: path.read_text() for path in (together / "logs").glob("generation*.trace.jsonl")}
    assert {name: '"generate"' in text for name, text in traces.items()} == {
        "generation0.0": True,
        "generation0.1": False,
    }


@pytest.mark.long
def test_four_ranks_sample_two_by_two_and_resume_after_the_death_of_a_leader(
    quickstart_model: Path, tmp_path: Path
) -> None:
    apart = tmp_path / "apart"
    together = tmp_path / "together"
    finished(command(quickstart_model, apart, axis="dp", ranks=1))
    colocated = command(quickstart_model, together, *IN_GROUPS, ranks=4)
    with running(colocated) as process:
        until_step(process, KILLED_AT)
        workers = workers_of(together)
        assert workers["training", 0, 1] == workers["generation", 1, 0]
        os.kill(pid_of(together, "training", 1), signal.SIGKILL)
        shown, _ = process.communicate(timeout=START)
    assert process.returncode == 75, shown
    assert "resuming" in finished(colocated)
    assert audit(together).ok
    assert rewards(together) == rewards(apart)
    part = cut_bytes(quickstart_model) / 4
    assert transitions(together) == {0: {(part, 0.0)}, 1: {(part, 0.0)}}, "Table 2 of HybridFlow"
    for replica in (0, 1):
        assert {group % 2 for group in sampled(together, replica)} == {replica}, "THREE_D_ALL_MICRO_DP"


@pytest.mark.long
@pytest.mark.parametrize("axis", ["pp", "stages", "shard", "dp"])
def test_tensor_ranks_of_every_layout_sample_together(axis: str, quickstart_model: Path, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    together = tmp_path / "together"
    finished(command(quickstart_model, apart, axis="dp", ranks=1, steps=3))
    more = [f"--training.layout.{axis}", "2"]
    if axis == "stages":
        more = ["--training.layout.pp", "2", "--generation.layout.pp", "2"]
    finished(command(quickstart_model, together, *IN_GROUPS, *more, steps=3))
    assert audit(together).ok
    assert rewards(together) == rewards(apart)
    last = "0.3" if axis == "stages" else "1.1"
    assert list((together / "logs").glob(f"generation{last}-*.trace.jsonl")), "four ranks, or two replicas of two"


def _run_of(run_dir: Path) -> str:
    """Returns the name of this start of the run in shared memory, from the address of a worker."""
    line = json.loads((run_dir / "fleet.jsonl").read_text().splitlines()[0])
    found = re.search(r"asyncrl-([0-9a-f]+)-", line["address"])
    assert found, line
    return found[1]
