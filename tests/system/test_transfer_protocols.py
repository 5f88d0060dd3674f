"""Every transfer protocol on the ranks of one live trainer with pipeline stages and tensor ranks: which rows each rank
is called with and reads, whose answers come back, and that the others answer with nothing."""

import asyncio
import os
import re
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from probed_training import ProbedTraining
from test_training_ranks_fleet import config_of, cuts_from, model, rows_of, store

from asyncrl.config.schema import Config
from asyncrl.controller.observers.inspection import describe_weights
from asyncrl.deploy.process.fork_client import forks_of
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import Refused
from asyncrl.fleet import fleet
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.message_codec import decode
from asyncrl.lanes.control.zmq_wire import ZmqCaller, ZmqWire
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.batch import BatchRef, is_divisible
from asyncrl.protocols.messages import Call, Reply, StepReport
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Lane

__all__ = ["model", "store"]

pytestmark = [pytest.mark.fleet, pytest.mark.ranks]

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "docs" / "reference" / "lanes.md"
LAYOUT = Layout(pp=2, tp=2, generation_pp=1, generation_tp=2)
"""Ranks 0 and 1 are the first stage, 2 and 3 the last; each of these pairs generates together."""
OWN_LAYOUT = Layout(tp=2, dp=2)
BARE = 40
"""Most bytes of a reply without a value."""


class Traffic:
    """What the controller sent to the work lane of each rank, and received: rows of calls, and replies with bytes."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = defaultdict(list)
        self.replies: dict[str, list[tuple[Any, int]]] = defaultdict(list)

    def watch(self, caller: ZmqCaller) -> ZmqCaller:
        offer = caller.offer
        pump = caller.pump
        address = caller.address

        def watched_offer(frames: Any) -> bool:
            taken = offer(frames)
            if taken and isinstance(call := message_in(frames), Call):
                self.rows[address] += [len(arg) for arg in call.args if is_divisible(arg)]
            return taken

        async def watched_pump(handle: Callable[[Any], None]) -> None:
            def watched(frames: Any) -> None:
                if isinstance(reply := message_in(frames), Reply):
                    self.replies[address].append((reply.value, sum(map(len, frames))))
                handle(frames)

            await pump(watched)

        # type: ignore[method-assign]
        caller.offer = watched_offer
        caller.pump = watched_pump
        return caller


def message_in(frames: Sequence[Any]) -> Any:
    return decode([frames[0][8:], *frames[1:]])


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    watched = Traffic()

    class WatchedWire(ZmqWire):
        def connect(self, address: str) -> ZmqCaller:
            return watched.watch(super().connect(address))

    monkeypatch.setattr(fleet, "ZmqWire", WatchedWire)
    return watched


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The protocol of a user's own, as the documentation has it, in a module that workers import too."""
    (program,) = re.findall(r"```python\n(.*?)```", EXAMPLE.read_text(), re.DOTALL)
    (tmp_path / "rows_in_turns.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return import_module("rows_in_turns")


@asynccontextmanager
async def started(config: Config, model: Path, run_dir: Path, example: Any) -> AsyncIterator[RunningFleet]:
    run = secrets.token_hex(4)
    trainer = "probed_training:ProbedTrainingService"
    facts = RunFacts(run, run_dir, model, 0, f"asyncrl-{run}-0-weights", config)
    specs = [
        ServiceSpec("training", ProbedTraining, trainer, layout=LAYOUT, origin="torch"),
        ServiceSpec("lengths", example.Lengths, "rows_in_turns:LengthsService", layout=OWN_LAYOUT),
    ]
    with forks_of(config) as forks, LocalLauncher(run, forks=forks) as launcher:
        async with running_fleet(specs, facts, launcher=launcher) as running:
            yield running


class Observed:
    """The ranks of one service, seen from outside. `of` makes a call and returns its result; rows, bytes_read: of each
    rank in it; answered: ranks that sent a value."""

    def __init__(self, running: RunningFleet, service: str, traffic: Traffic) -> None:
        self._handle = running.handle(service, ProbedTraining)
        self._traffic = traffic
        size = running.workers[service].layout.size
        specs = [running.supervisor.instances[f"{service}0.{rank}"].spec for rank in range(size)]
        self._addresses = [spec.reached_at(Lane.WORK.value) for spec in specs]
        self.rows: list[int] = []
        self.bytes_read: list[int] = []
        self.answered: list[int] = []

    async def of(self, call: Any) -> Any:
        before = await self._read()
        self._traffic.rows.clear()
        self._traffic.replies.clear()
        result = await call
        replies = [self._traffic.replies[address] for address in self._addresses]
        assert [len(each) for each in replies] == [1] * len(replies), "each rank replies once"
        assert all(size <= BARE for ((value, size),) in replies if value is None)
        self.answered = [rank for rank, ((value, _),) in enumerate(replies) if value is not None]
        self.rows = [sum(self._traffic.rows[address]) for address in self._addresses]
        self.bytes_read = [now - then for now, then in zip(await self._read(), before, strict=True)]
        return result

    async def _read(self) -> list[int]:
        return [int(health.counters["row_bytes_read"]) for health in await self._handle.health()]


def token_bytes(rows: Sequence[TrainRow], name: str) -> int:
    """Bytes of a column, which all have four a token."""
    return 4 * sum(len(getattr(row, name)) for row in rows)


def test_each_protocol_moves_what_ranks_need_and_nothing_else(
    model: Path, store: RowStore, tmp_path: Path, traffic: Traffic, example: Any
) -> None:
    one = PolicyTrainer(config_of(training={"learning_rate": 1e-3}), model)
    expected = run_step(one, rows_of(0), 0, 0)

    async def main() -> None:
        config = config_of(training={"learning_rate": 1e-3, "layout": {"pp": 2, "tp": 2}})
        async with asyncio.timeout(200), started(config, model, tmp_path, example) as running:
            training = running.handle("training", ProbedTraining)
            ranks = Observed(running, "training", traffic)
            rows = rows_of(0)
            cuts = cuts_from(rows_of(0), 0, store)
            report = await ranks.of(training.step(cuts))
            assert isinstance(report, StepReport)
            assert report.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-5)
            assert (ranks.answered, ranks.rows) == ([2], [len(rows)] * 4), "THREE_D_PROTO"
            trained = ("prompt_ids", "response_ids", "versions", "logprobs")
            assert ranks.bytes_read == [sum(token_bytes(rows, name) for name in trained)] * 4
            await _inspects_stages(training, ranks, one)
            await _splits_rows(training, ranks, rows, cuts.batch)
            repeated = await ranks.of(training.repeat(["a", "b", "c", "d"], [1, 2, 3, 4]))
            assert repeated == ["rank 0: a", "rank 1: bb", "rank 2: ccc", "rank 3: dddd"], "ALL_TO_ALL"
            await _takes_turns(running, traffic, example, rows, cuts.batch)

    asyncio.run(main())


async def _inspects_stages(training: ProbedTraining, ranks: Observed, one: PolicyTrainer) -> None:
    held = await ranks.of(training.held_weights())
    assert ranks.answered == [0, 2], "THREE_D_PP_ONLY"
    assert [(each.stage, each.version) for each in held] == [(0, 1), (1, 1)]
    first, last = (each.tensors for each in held)
    whole = one.named_tensors()
    assert first.keys() | last.keys() == whole.keys()
    assert not first.keys() & last.keys()
    for name, (_, norm) in (first | last).items():
        is_split = re.search(r"(q|k|v|o|gate|up|down)_proj", name) is not None
        assert (norm < 0.95 * whole[name].norm().item()) == is_split, "tensor ranks hold parts of matrices"
        assert is_split or norm == pytest.approx(whole[name].norm().item(), rel=1e-4)
    shown = await describe_weights(training, "*.0.self_attn.q_proj.*")
    assert re.search(r"^ +0  training0\.0-\S+ +\d+ +\d+\.\d+  [0-9a-f]{16}$", shown, re.MULTILINE)
    assert re.search(r"^ +1  training0\.2-", shown, re.MULTILINE)
    assert shown.count("q_proj") == 1
    with pytest.raises(Refused, match=r"no tensor is called 'nothing'; one is called"):
        await describe_weights(training, "nothing")


async def _splits_rows(training: ProbedTraining, ranks: Observed, rows: Sequence[TrainRow], samples: BatchRef) -> None:
    assert await ranks.of(training.lengths(samples)) == [len(row.response_ids) for row in rows]
    quarters = [rows[:3], rows[3:6], rows[6:9], rows[9:]]
    assert (ranks.answered, ranks.rows) == ([0, 1, 2, 3], [3, 3, 3, 2]), "DP_PROTO"
    assert ranks.bytes_read == [token_bytes(part, "response_ids") for part in quarters]
    assert await ranks.of(training.prompts(samples)) == [row.prompt_ids.tolist() for row in rows]
    assert (ranks.answered, ranks.rows) == ([0, 2], [6, 6, 5, 5]), "THREE_D_ALL_MICRO_DP"
    halves = [rows[:6], rows[:6], rows[6:], rows[6:]]
    assert ranks.bytes_read == [token_bytes(part, "prompt_ids") for part in halves]


async def _takes_turns(
    running: RunningFleet, traffic: Traffic, example: Any, rows: Sequence[TrainRow], samples: BatchRef
) -> None:
    ranks = Observed(running, "lengths", traffic)
    answer = await ranks.of(running.handle("lengths", example.Lengths).lengths(samples))
    assert answer == [len(row.response_ids) for row in rows]
    assert (ranks.answered, ranks.rows) == ([0, 2], [6, 6, 5, 5])
    turns = [rows[::2], rows[::2], rows[1::2], rows[1::2]]
    assert ranks.bytes_read == [token_bytes(part, "response_ids") for part in turns]
