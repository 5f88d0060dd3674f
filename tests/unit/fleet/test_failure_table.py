"""The failure table, cell by cell, over fleets of two replicas (or ranks) in this process, and its copy in the docs."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.controller.recovery import PROMPT, begin_incarnation, end_learners
from asyncrl.errors import (
    AlgorithmError,
    AsyncrlError,
    ConfigError,
    DeadlineExceeded,
    EnvironmentFailed,
    FleetFailed,
    LostRows,
    PeerLost,
    Refused,
    RemoteError,
    RewardError,
    TaskError,
    WeightsError,
)
from asyncrl.fleet import supervisor
from asyncrl.fleet.failure_table import TABLE, Ends, Raised, When, Who, is_everywhere, is_fault
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, running_fleet
from asyncrl.fleet.launching.joining import START_TRIES
from asyncrl.fleet.launching.launcher import LaunchedWorker, Launcher
from asyncrl.fleet.lifecycle_events import FleetEvent, OfferDropped, WorkerLost, WorkerStarted
from asyncrl.fleet.supervisor import Learners
from asyncrl.fleet.worker.service import Service
from asyncrl.fleet.worker.worker_spec import RunFacts, WorkerSpec
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.distribute_collect import ONE_OF, ONE_TO_ALL
from asyncrl.protocols.messages import Health
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, Idempotent, Lane, Training, endpoint
from tests.virtual_time import on_virtual_time

PATIENCE = 30.0
DOCS = Path(__file__).parents[3] / "docs" / "reliability.md"
ECC = "CUDA error: uncorrectable ECC error"
HERE = HostId.here().name


class Twin(Contract):
    """A service of which each replica does what the test says."""

    @endpoint(ONE_OF, idempotent=Idempotent.PURE)
    async def ask(self, group: int = -1) -> str:
        raise NotImplementedError

    @endpoint(ONE_OF)
    async def spend(self) -> str:
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL, idempotent=Idempotent.PURE)
    async def names(self) -> list[str]:
        raise NotImplementedError


class Learner(Training):
    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def learn(self) -> list[str]:
        raise NotImplementedError


class Stage:
    """A fleet that runs. errors: what the next calls of a worker raise, by its name ("twin1.0") and the call. stopped:
    names of workers that do not even answer for their health."""

    def __init__(self) -> None:
        self.errors: dict[tuple[str, str], list[BaseException]] = {}
        self.stopped: set[str] = set()
        self.running: RunningFleet
        self.lost: list[str] = []
        self.said: list[str] = []
        self.dropped: list[str] = []
        self._happened = asyncio.Event()

    def raises(self, worker: str, call: str, *errors: BaseException) -> None:
        self.errors[worker, call] = list(errors)

    def attempt(self, worker: str, call: str) -> None:
        if errors := self.errors.get((worker, call)):
            raise errors.pop(0)

    def note(self, event: FleetEvent) -> None:
        if isinstance(event, WorkerLost):
            assert not event.has_left, "nobody asked it to leave"
            self.lost.append(event.reason)
        if isinstance(event, OfferDropped):
            self.dropped.append(event.instance)
        if isinstance(event, WorkerLost | WorkerStarted | OfferDropped):
            self._happened.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._happened.clear()
                await self._happened.wait()

    def alive(self, service: str = "twin") -> list[str]:
        return [worker.instance for worker in self.running.workers[service] if worker.alive]

    @property
    def twin(self) -> Twin:
        return self.running.handle("twin", Twin)

    @asynccontextmanager
    async def fleet(self, *, joined: int = 0, ranks: int = 1, replicas: int = 2) -> AsyncIterator[None]:
        stage = self

        class TwinService(Service, Twin):
            renews = True

            @property
            def name(self) -> str:
                return self.context.spec.instance.partition("-")[0]

            async def start(self) -> None:
                stage.attempt(self.name, "start")

            async def health(self) -> list[Health]:
                if self.name in stage.stopped:
                    await asyncio.Event().wait()
                return await super().health()

            async def ask(self, group: int = -1) -> str:
                stage.attempt(self.name, "ask")
                return self.name

            async def spend(self) -> str:
                stage.attempt(self.name, "spend")
                return self.name

            async def names(self) -> list[str]:
                stage.attempt(self.name, "names")
                return [self.name]

        class LearnerService(Service, Learner):
            async def start(self) -> None:
                stage.attempt(f"training0.{self.context.spec.rank}", "start")

            async def learn(self) -> list[str]:
                stage.attempt(f"training0.{self.context.spec.rank}", "learn")
                return ["learnt"]

        config = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"))
        facts = RunFacts(secrets.token_hex(4), self.folder, self.folder, 0, "none", config)
        specs = [
            ServiceSpec("twin", Twin, TwinService, replicas=replicas, here=True, joined=joined),
            ServiceSpec("training", Learner, LearnerService, layout=Layout(dp=ranks), here=True),
        ]
        async with running_fleet(specs, facts, report=self.said.append, resume="asyncrl run x") as self.running:
            self.running.subscribers.append(self.note)
            yield

    folder = Path()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.001)
    Stage.folder = tmp_path
    return Stage()


def broken() -> RuntimeError:
    return RuntimeError(ECC)


def ends_run(match: str) -> pytest.RaisesExc[FleetFailed]:
    return pytest.raises(FleetFailed, match=match)


# ---- newcomers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [broken(), PeerLost("it fell over")])
async def test_a_place_that_no_start_waits_for_costs_its_offer_when_it_cannot_start(stage: Stage, error: Any) -> None:
    stage.raises("twin1.0", "start", error)
    async with stage.fleet(joined=1):
        await stage.until(lambda: len(stage.alive()) == 2)
        assert stage.errors["twin1.0", "start"] == []


async def test_newcomers_that_never_start_cost_their_offer_and_end_no_run(stage: Stage) -> None:
    for name in ("twin2.0", "twin3.0"):
        stage.raises(name, "start", *[broken() for _ in range(START_TRIES)])
    async with stage.fleet():
        before = stage.alive()
        for _ in range(2):
            stage.running.add_replica("twin")
        await stage.until(lambda: len(stage.dropped) == 2)
        assert stage.alive() == before
        assert len([why for why in stage.lost if f"it could not start on {HERE}: " in why and ECC in why]) == 6
        told = [text for text in stage.said if "is not started any more after 3 tries: " in text]
        assert all(HERE in text and ECC in text and "twin=N` asks for it again" in text for text in told)
        assert sorted(text.partition(" ")[0] for text in told) == ["twin2.0", "twin3.0"]
        for slot in stage.running.supervisor.slots_of("twin"):
            slot.wanted.set()
        await stage.until(lambda: len(stage.alive()) == 4)


async def test_what_others_could_not_start_does_not_count_as_deaths_of_a_newcomer(stage: Stage) -> None:
    stage.raises("twin2.0", "start", broken(), broken())
    async with stage.fleet():
        stage.running.add_replica("twin")
        await stage.until(lambda: len(stage.alive()) == 3)
        for instance in stage.alive():
            stage.running.supervisor.kill(instance)
        await stage.until(lambda: len(stage.alive()) == 3)


# ---- workers that start again alone ------------------------------------------------------------------------------


async def test_what_one_of_two_raises_at_the_first_start_of_all_ends_the_run(stage: Stage) -> None:
    stage.raises("twin1.0", "start", broken())
    with pytest.raises(RemoteError, match=rf"twin1\[0\] raised RuntimeError: {ECC}"):
        async with stage.fleet():
            pytest.fail("it started")


async def test_a_later_start_that_fails_ends_that_worker(stage: Stage) -> None:
    async with stage.fleet():
        kept, killed = stage.alive()
        stage.raises("twin1.0", "start", broken(), ConfigError("no GPU"))
        stage.running.supervisor.kill(killed)
        await stage.until(lambda: len(stage.lost) == 3 and len(stage.alive()) == 2)
        assert stage.alive()[0] == kept
        assert stage.lost[1:] == [
            f"it could not start on {HERE}: twin1[0] raised RuntimeError: {ECC}",
            f"it could not start on {HERE}: twin1[0]: no GPU",
        ]


def kind_of(error: object) -> str:
    return type(error).__name__


ANY = [
    broken(),
    ConfigError("this host has no bubblewrap"),
    TimeoutError("nfs: server not responding"),
    Refused("another incarnation"),
    MemoryError("CUDA out of memory"),
    OSError(116, "Stale file handle"),
    KeyError("state"),
    WeightsError("weights are damaged"),
    AsyncrlError("something else"),
]


@pytest.mark.parametrize("error", ANY[:4], ids=kind_of)
async def test_any_error_of_one_of_two_ends_that_worker_and_the_other_one_answers(stage: Stage, error: Any) -> None:
    async with stage.fleet():
        kept, failing = stage.alive()
        stage.raises("twin1.0", "ask", error)
        answers = [await stage.twin.ask() for _ in range(2)]
        assert answers == ["twin0.0", "twin0.0"], "one of them was asked of the other one first"
        assert stage.errors["twin1.0", "ask"] == []
        await stage.until(lambda: len(stage.alive()) == 2)
        assert stage.alive()[0] == kept
        assert stage.alive()[1] != failing
        assert stage.lost[0].startswith("twin1[0]")
        assert str(error.args[-1]) in stage.lost[0]


async def test_a_call_that_must_not_be_repeated_is_lost_with_its_worker(stage: Stage) -> None:
    async with stage.fleet():
        stage.raises("twin0.0", "spend", broken())
        stage.raises("twin1.0", "spend", broken())
        with pytest.raises(PeerLost, match=rf"twin\d\.0-0-\w+: twin\d\[0\] raised RuntimeError: {ECC}"):
            await stage.twin.spend()
        await stage.until(lambda: len(stage.alive()) == 2)


MISTAKEN = [
    TaskError("row 3 has no prompt"),
    RewardError("reward function r.py:reward on member 3 of row 7: it raised FileNotFoundError: /data/w.json"),
    AlgorithmError("roll_out of mine raised KeyError"),
    EnvironmentFailed("environment 3 cannot begin an episode: No module named 'nethack'"),
]


@pytest.mark.parametrize("error", MISTAKEN, ids=kind_of)
async def test_a_mistake_that_both_of_two_meet_is_raised_as_it_is(stage: Stage, error: Any) -> None:
    async with stage.fleet():
        for name in ("twin0.0", "twin1.0"):
            stage.raises(name, "ask", error)
        with pytest.raises(type(error), match=re.escape(str(error))):
            await stage.twin.ask()
        assert len(stage.lost) == 1


async def test_a_mistake_of_a_replica_that_is_alone_is_raised_at_once(stage: Stage) -> None:
    async with stage.fleet(replicas=1):
        before = stage.alive()
        stage.raises("twin0.0", "ask", RewardError("it raised KeyError"))
        with pytest.raises(RewardError):
            await stage.twin.ask()
        assert stage.alive() == before


async def test_one_of_two_that_meets_mistakes_at_each_sample_never_ends_the_run(stage: Stage) -> None:
    texts = [RewardError(f"reward r.py on member {n} of row {n}: it raised ImportError: no lxml") for n in range(4)]
    async with stage.fleet():
        kept = stage.alive()[0]
        stage.raises("twin1.0", "ask", *texts)
        for number in range(len(texts)):
            while stage.errors["twin1.0", "ask"][len(texts) - 1 - number :]:
                assert await stage.twin.ask(number) == "twin0.0"
            await stage.until(lambda: len(stage.alive()) == 2)
        assert stage.alive()[0] == kept
        assert all(str(text) in lost for text, lost in zip(texts, stage.lost, strict=True))


async def test_mistakes_at_one_sample_only_end_the_run_where_all_replicas_met_it(stage: Stage) -> None:
    def mistake(answer: str) -> RewardError:
        return RewardError(f"it raised ValueError: could not convert string to float: {answer!r}\n  completion: x")

    async with stage.fleet():
        stage.raises("twin0.0", "names", mistake("a"), mistake("b"))
        stage.raises("twin1.0", "names", mistake("b"), mistake("a"))
        with pytest.raises(RewardError, match=r"float: '[ab]'"):
            await stage.twin.names()
        assert len(stage.lost) >= 2, "their next instances met them, too"


@pytest.mark.parametrize("error", [LostRows("overwritten"), DeadlineExceeded("weights at tcp://t came late")])
async def test_what_a_worker_heard_from_others_ends_no_worker(stage: Stage, error: Any) -> None:
    async with stage.fleet():
        before = stage.alive()
        for name in ("twin0.0", "twin1.0"):
            stage.raises(name, "names", error)
        with pytest.raises(type(error)):
            await stage.twin.names()
        assert stage.alive() == before


async def test_the_same_at_all_replicas_ends_the_run_with_the_command(stage: Stage) -> None:
    with ends_run(r"all workers of twin raised the same: .* asyncrl run x") as ended:
        async with stage.fleet():
            for number in range(2):
                stage.raises(f"twin{number}.0", "names", RuntimeError(f"out of memory: {81 - number} GiB"))
            with suppress(PeerLost):
                await stage.twin.names()
            await asyncio.sleep(PATIENCE)
    assert ended.value.exit_code == 75


async def test_what_a_replica_made_good_does_not_count_when_the_other_one_raises_it(stage: Stage) -> None:
    async with stage.fleet():
        for name in ("twin0.0", "twin1.0", "twin0.0"):
            stage.raises(name, "names", broken())
            await stage.twin.names()
            await stage.until(lambda: len(stage.alive()) == 2)
            assert len(await stage.twin.names()) == 2
        assert len(stage.lost) == 3


async def test_one_of_two_may_die_as_often_as_it_likes_while_the_other_one_lives(stage: Stage) -> None:
    async with stage.fleet():
        kept = stage.alive()[0]
        for number in range(supervisor.MAX_DEATHS + 2):
            stage.running.supervisor.kill(stage.alive()[1])
            await stage.until(lambda number=number: len(stage.lost) == number + 1 and len(stage.alive()) == 2)
        assert stage.alive()[0] == kept


async def test_both_of_two_that_die_too_often_end_the_run(stage: Stage) -> None:
    with ends_run(r"twin\d\.0 died 6 times without .* Resume with: asyncrl run x"):
        async with stage.fleet():
            for number in range(supervisor.MAX_DEATHS):
                for instance in stage.alive():
                    stage.running.supervisor.kill(instance)
                await stage.until(lambda number=number: len(stage.lost) == 2 * number + 2 and len(stage.alive()) == 2)


# ---- ranks -------------------------------------------------------------------------------------------------------


async def test_an_error_of_one_of_two_ranks_that_learn_ends_both_and_they_start_again(stage: Stage) -> None:
    async with stage.fleet(ranks=2):
        learners = stage.running.supervisor.learners = Learners()
        others = stage.alive()
        before = stage.alive("training")
        stage.raises("training0.1", "learn", broken())
        with pytest.raises(PeerLost):
            await stage.running.handle("training", Learner).learn()
        assert (await learners.lost).startswith("training0.1 died: training0[1] raised RuntimeError")
        await stage.running.supervisor.end_learners()
        stage.running.meetings.forget(["training"])
        learners.start_again()
        await stage.until(lambda: len(stage.alive("training")) == 2)
        assert {*before}.isdisjoint(stage.alive("training"))
        assert stage.alive() == others


async def test_a_rank_that_cannot_start_again_ends_the_set_again_and_at_last_the_run(stage: Stage) -> None:
    with ends_run(r"training0\.1 died: it could not start on .*ECC.*asyncrl run x"):
        async with stage.fleet(ranks=2):
            learners = stage.running.supervisor.learners = Learners()
            stage.raises("training0.1", "learn", broken())
            with suppress(PeerLost):
                await stage.running.handle("training", Learner).learn()
            await learners.lost
            await stage.running.supervisor.end_learners()
            stage.raises("training0.1", "start", broken())
            learners.start_again()
            await learners.lost
            learners.give_up()
            await asyncio.sleep(PATIENCE)


@pytest.mark.parametrize(
    ("error", "may_go_back", "raised"),
    [
        (AlgorithmError("the loss raised KeyError"), True, AlgorithmError),
        (OSError(28, "No space left on device"), True, RemoteError),
        (broken(), False, RemoteError),
    ],
)
async def test_an_error_of_a_rank_that_no_return_mends_ends_the_run_as_it_is(
    stage: Stage, error: Exception, may_go_back: bool, raised: type[AsyncrlError]
) -> None:
    """A mistake, a full disk, and any error where the run may not go back."""
    async with stage.fleet(ranks=2):
        stage.running.supervisor.learners = Learners() if may_go_back else None
        stage.raises("training0.1", "learn", error)
        with pytest.raises(raised, match=re.escape(str(error.args[-1]))):
            await stage.running.handle("training", Learner).learn()
        assert stage.lost == []


# ---- the next incarnation of a run, after a worker that learns died: nobody waits for a host that is cut off -------


class JoinPoint:
    """Starts workers with a launcher, but only while a host is there. incarnations: of those that were to start."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.host = asyncio.Event()
        self.incarnations: list[int] = []

    async def spawn(self, spec: WorkerSpec) -> LaunchedWorker:
        self.incarnations.append(spec.facts.incarnation)
        await self.host.wait()
        return await self.launcher.spawn(spec)

    def clean_up(self, spec: WorkerSpec) -> None:
        self.launcher.clean_up(spec)


async def go_back(stage: Stage) -> float:
    """Kills the worker that learns, and takes the others into the next incarnation; returns the seconds of it."""
    running = stage.running
    learners = running.supervisor.learners = Learners()
    running.supervisor.kill(stage.alive("training")[0])
    await learners.lost
    await end_learners(running)
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(100):
        await begin_incarnation(running, running.facts.renewed(1, Path("checkpoint")))
    assert stage.alive("training"), "it is started again"
    return asyncio.get_running_loop().time() - began


@on_virtual_time
async def test_a_run_goes_back_without_a_worker_whose_host_is_away(stage: Stage) -> None:
    async with stage.fleet(joined=2):
        (slot,) = (each for each in stage.running.supervisor.slots_of("twin") if each.worker.name == "twin1.0")
        kept, gone = stage.alive()
        slot.launcher = away = JoinPoint(slot.launcher)
        stage.running.supervisor.kill(gone)
        await stage.until(lambda: stage.alive() == [kept])
        await asyncio.sleep(5)
        assert await go_back(stage) < 1
        assert stage.alive() == [kept], "the other one stays what it was"
        assert away.incarnations == [0, 1], "the host that comes starts no worker of the incarnation before"
        away.host.set()
        await stage.until(lambda: len(stage.alive()) == 2)
        assert stage.alive()[1].startswith("twin1.0-1-")


@on_virtual_time
async def test_a_run_goes_back_without_a_worker_that_stands_still(stage: Stage) -> None:
    async with stage.fleet(joined=2):
        kept, silent = stage.alive()
        await asyncio.sleep(5)
        stage.stopped.add("twin1.0")
        assert await go_back(stage) < PROMPT + 1
        assert kept in stage.alive()
        assert silent not in stage.alive()
        stage.stopped.clear()
        await stage.until(lambda: len(stage.alive()) == 2)
        assert stage.alive()[1].startswith("twin1.0-1-")


# ---- the table ---------------------------------------------------------------------------------------------------


def test_the_table_is_the_one_of_the_docs() -> None:
    wanted = ["| " + " | ".join(["who failed", *(when.value for when in When)]) + " |", "|" + "---|" * (1 + len(When))]
    for who in Who:
        cells = [TABLE[who][when].name.lower().replace("_", " ") for when in When]
        wanted.append("| " + " | ".join([who.value, *cells]) + " |")
    text = DOCS.read_text()
    assert "\n".join(wanted) in text
    for ends in Ends:
        assert f"- **{ends.name.lower().replace('_', ' ')}**: {ends.value.partition(': ')[2] or ends.value}" in text


def test_faults_are_errors_of_whoever_raised_them() -> None:
    assert all(is_fault(error) for error in ANY if not isinstance(error, Refused))
    assert all(map(is_fault, MISTAKEN))
    others = (PeerLost(""), LostRows(""), DeadlineExceeded(""), Refused(""))
    assert not any(map(is_fault, others))


def test_what_comes_late_from_afar_is_no_end_of_a_wait_here() -> None:
    assert not issubclass(DeadlineExceeded, TimeoutError | OSError)


def mistaken(text: str, *groups: int) -> Raised:
    return Raised.of("ask", RewardError(text), groups=groups)


def raised(text: str, *groups: int, times: int = 1) -> Raised:
    first = Raised.of("ask", RuntimeError(text), groups=groups)  # type: ignore[arg-type]
    return first if times == 1 else first.after(raised(text, *groups, times=times - 1))


@pytest.mark.parametrize(
    ("replicas", "everywhere"),
    [
        ([raised("a 1"), raised("a 22")], True),
        ([raised("a"), raised("b")], False),
        ([raised("a"), None], False),
        ([raised("a")], False),
        ([raised("a", times=2)], True),
        ([raised("a", 7), raised("a", 7, 8)], False),
        ([raised("a", 7), raised("a", 8)], True),
        ([raised("a", 7, times=3)], False),
        ([mistaken("a")], True),
        ([mistaken("a 1"), mistaken("a 2")], True),
        ([mistaken("a\nb"), mistaken("a\nc")], True),
        ([mistaken("a", 7), mistaken("b", 8)], False),
        ([mistaken("a", 7), mistaken("b", 7, 8)], True),
        ([mistaken("c", 8).after(mistaken("a", 7)), mistaken("b", 7)], True),
        ([mistaken("a"), mistaken("a"), None], False),
        ([mistaken("a"), raised("a")], False),
    ],
)
def test_everywhere_is_the_same_of_all_with_no_group_in_common(replicas: list[Any], everywhere: bool) -> None:
    assert is_everywhere(replicas) == everywhere
