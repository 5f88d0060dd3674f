"""Runs reward functions in child processes (child_server.py), which are replaced when they hang or crash. A child runs
one plain function at a time, because plain functions compute. Coroutine functions wait, so many of them run at once in
one more child. Further calls wait here; the gate bounds the samples in flight, and so these calls."""

import asyncio
import itertools
import math
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from asyncrl.children.containment import Containment
from asyncrl.children.guarded_process import ChildEnded, ChildSettings, ChildSlot, GuardedProcess
from asyncrl.children.printed_output import ChildOutput, PrintedFile
from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError, WireError
from asyncrl.rewards.execution.child_server import plain_samples
from asyncrl.rewards.functions import OVERLAPPING, FunctionSpec
from asyncrl.rewards.sample import FunctionResult, Sample
from asyncrl.rewards.templates import JUDGE_TEMPLATE

GRACE = 1.0
"""Seconds a child has to end an overdue coroutine by itself, before it is killed."""

SERVER = "asyncrl.rewards.execution.child_server"
OWNER = "the reward worker"


class CallEnded(ChildEnded):
    """The child ended during a call. received: results that came before; it ended at the sample after them."""

    def __init__(self, ended: ChildEnded, received: Sequence[FunctionResult]) -> None:
        super().__init__(str(ended), vanished=ended.vanished)
        self.received = received


@dataclass(eq=False, slots=True)
class Answer:
    """Collects the results of one call."""

    samples: int
    results: list[FunctionResult] = field(default_factory=list)
    _ended: ChildEnded | None = None
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, results: Sequence[FunctionResult], ended: ChildEnded | None = None) -> None:
        """Adds results; raises WireError if there are more than samples. ended: why no more results will come."""
        if len(self.results) + len(results) > self.samples:
            raise WireError(f"more results than the {self.samples} samples of a call")
        self.results += results
        self._ended = ended
        self._moved.set()

    async def whole(self, timeout: float) -> list[FunctionResult]:
        """Waits for all results; raises ChildEnded, or TimeoutError if the next one takes over `timeout` seconds."""
        while len(self.results) < self.samples:
            if self._ended is not None:
                raise self._ended
            async with asyncio.timeout(timeout):
                await self._moved.wait()
            self._moved.clear()
        return self.results


class ChildProcess(GuardedProcess):
    """A running child. overlapping: how many calls of each function may overlap; 0 for a plain function."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._answers: dict[int, Answer] = {}
        self._numbers = itertools.count()
        self.overlapping: list[int] = []

    @classmethod
    async def spawn(cls, specs: Sequence[FunctionSpec], settings: ChildSettings) -> "ChildProcess":
        """Starts a child that loads these functions; raises as `GuardedProcess.launch` does."""
        name = f"{specs[0].key}: {', '.join(spec.use for spec in specs)}"
        return await cls.launch(SERVER, [asdict(spec) for spec in specs], name, settings)

    async def call(
        self, function: int, samples: Sequence[Sample], deadline: float, grace: float
    ) -> list[FunctionResult]:
        """Returns the results of one function; raises ChildEnded if the child ended, or hung and was killed, before it
        had scored all samples. deadline: seconds for each sample, or group if the function scores groups, which the
        child enforces for coroutines. grace: further seconds until the child is killed."""
        number = next(self._numbers)
        answer = Answer(len(samples))
        self._answers[number] = answer
        try:
            await self.send({"call": number, "function": function, "deadline": deadline, **plain_samples(samples)})
            return _of_whole_samples(await answer.whole(deadline + grace), samples)
        except TimeoutError:
            await self.kill()
            raise CallEnded(ChildEnded(f"it hung: no answer within {deadline:g} s"), answer.results) from None
        except ChildEnded as ended:
            await self.kill()
            raise CallEnded(ended, answer.results) from None
        finally:
            self._answers.pop(number, None)

    def greeted(self, message: Any) -> None:
        match message:
            case {"overlapping": [*overlapping]}:
                self.overlapping = overlapping
            case _:
                raise WireError(f"a reward child began with {message!r:.100}")

    def finish(self, ended: ChildEnded) -> None:
        for answer in self._answers.values():
            answer.take((), ended)

    def take(self, message: Any) -> None:
        match message:
            case {"call": int(number), "results": [*results]}:
                self.finished += len(results)
                if (answer := self._answers.get(number)) is not None:
                    answer.take([_result(fields) for fields in results])
            case _:
                raise WireError(f"{message!r:.100}")


def _result(fields: Any) -> FunctionResult:
    match fields:
        case [
            None | int() | float() | dict() as value,
            str(reason),
            str(trace),
            [*tokens],
            int(many),
            dict(logged),
            bool(of_row),
            bool(unjudged),
        ] if all(isinstance(each, int | float) for each in (*tokens, *logged.values())):
            return FunctionResult(value, reason, trace, tuple(tokens), many, logged, of_row, unjudged)
    raise WireError(f"no result: {fields!r:.100}")


def _of_whole_samples(results: list[FunctionResult], samples: Sequence[Sample]) -> list[FunctionResult]:
    """Returns the results; raises WireError for rewards of tokens that are not as many as the sample has."""
    for result, sample in zip(results, samples, strict=True):
        if len(result.tokens) not in (0, sample.tokens):
            raise WireError(f"{len(result.tokens)} rewards for the {sample.tokens} tokens of member {sample.member}")
    return results


class CallSlots(asyncio.Semaphore):
    """Limits how many calls run at one time. waiting: number of calls that wait for a slot."""

    waiting = 0

    async def acquire(self) -> Literal[True]:
        self.waiting += 1
        try:
            return await super().acquire()
        finally:
            self.waiting -= 1


class ChildPool:
    """Runs reward functions in `workers` children and, if there are coroutine functions, one more. deadline: seconds
    that one call of a function may take. start_deadline: seconds that a child may take to load them. tasks: owns the
    calls, which outlive a caller that was cancelled, so that its child is not killed for it. printed: file of what the
    functions print. first_failure_only: no sample is tried after one at which a child ended, because the caller gives
    up at the first failure. containment: what the children do without; None: nothing. variables: names of environment
    variables that they get beside harmless ones and the keys of their judges."""

    def __init__(
        self,
        specs: Sequence[FunctionSpec],
        tasks: asyncio.TaskGroup,
        *,
        workers: int,
        deadline: float,
        start_deadline: float,
        printed: Path,
        first_failure_only: bool = False,
        containment: Containment | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        self.specs = tuple(specs)
        self._tasks = tasks
        self._deadline = deadline
        self._first_failure_only = first_failure_only
        self._output = ChildOutput(PrintedFile(printed))
        judges = [str(spec.options.get("key_variable", "")) for spec in self.specs if spec.use == JUDGE_TEMPLATE]
        settings = ChildSettings(start_deadline, tasks, self._output, containment, (*variables, *judges))
        spawn = partial(ChildProcess.spawn, self.specs, settings)
        self._own = [ChildSlot(OWNER, spawn) for _ in range(workers)]
        self._shared = ChildSlot(OWNER, spawn)
        self._free = list(self._own)
        self._alone_at_a_time = CallSlots(workers)
        self._overlapping = CallSlots(OVERLAPPING)
        self._slots: list[CallSlots | None] = []
        self._given_up = 0

    @property
    def finished(self) -> int:
        """Samples scored so far, and children that ended at one. Not exact: a sample may count twice."""
        return self._given_up + sum(slot.finished for slot in (self._shared, *self._own))

    @property
    def queued(self) -> int:
        """Calls that wait for their turn."""
        slots = {self._alone_at_a_time, self._overlapping, *filter(None, self._slots)}
        return sum(each.waiting for each in slots)

    async def start(self) -> None:
        """Starts a child; raises ConfigError if it cannot load a function, DeadlineExceeded if that takes too long."""
        if self.specs:
            with ExitStack() as unless_started:
                unless_started.callback(self._output.close)
                self._output.open()
                self._slots = [self._slots_for(most) for most in (await self._own[0].child()).overlapping]
                unless_started.pop_all()

    def _slots_for(self, most: int) -> CallSlots | None:
        """Returns the slots for calls of a function that overlap; None for a plain function."""
        return None if not most else self._overlapping if most >= OVERLAPPING else CallSlots(most)

    async def run(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Returns the result of function number `function` for each sample; errors of the function are results too."""
        return await asyncio.shield(self._tasks.create_task(self._all(function, samples)))

    async def stop(self) -> None:
        """Kills all children; calls that still run end with a result that says so."""
        for slot in (self._shared, *self._own):
            await slot.stop()
        self._output.close()

    async def _all(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Splits samples into calls: one for a group, one a sample for coroutines, else one for each child."""
        if self.specs[function].group:
            shares = [samples]
        elif self._slots[function] is not None:
            shares = [[sample] for sample in samples]
        else:
            size = math.ceil(len(samples) / len(self._own))
            shares = [samples[start : start + size] for start in range(0, len(samples), size)]
        found = await gather(*(self._share(function, share) for share in shares))
        return [result for results in found for result in results]

    async def _share(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Calls a coroutine beside others. If their child ends, any of its calls may be the cause, so each is repeated
        alone."""
        if (slots := self._slots[function]) is not None:
            try:
                async with slots:
                    return await (await self._shared.child()).call(function, samples, self._deadline, GRACE)
            except ChildEnded:
                pass
            except AsyncrlError as error:
                return _uncalled(samples, error)
        async with self._alone_at_a_time:
            slot = self._free.pop()
            try:
                return await self._alone(slot, function, samples)
            finally:
                self._free.append(slot)

    async def _alone(
        self, slot: ChildSlot[ChildProcess], function: int, samples: Sequence[Sample]
    ) -> list[FunctionResult]:
        """Calls again with the remaining samples when a child ends; its current sample gets the error as its result,
        after a signal, which may come from outside, only if a second child ends at the same sample."""
        grace = GRACE if self._slots[function] is not None else 0.0
        found: list[FunctionResult] = []
        vanished_at = -1
        while len(found) < len(samples):
            rest = samples[len(found) :]
            try:
                found += await (await slot.child()).call(function, rest, self._deadline, grace)
            except ChildEnded as ended:
                self._given_up += 1
                found += ended.received if isinstance(ended, CallEnded) else ()
                if ended.vanished and vanished_at != len(found):
                    vanished_at = len(found)
                    continue
                failed = len(rest) if self.specs[function].group else 0
                reason = f"{ended}; so was another one at the same sample" if ended.vanished else str(ended)
                unjudged = self._slots[function] is None and not self.specs[function].is_users
                found += [FunctionResult(reason=reason, failed_together=failed, unjudged=unjudged)] * (failed or 1)
                if self._first_failure_only and not unjudged:
                    found += _uncalled(samples[len(found) :], "a sample before it failed")
            except AsyncrlError as error:
                found += _uncalled(rest, error)
        return found


def _uncalled(samples: Sequence[Sample], why: object) -> list[FunctionResult]:
    return [FunctionResult(reason=f"it could not be called: {why}")] * len(samples)


# Runs reward functions of the user in contained children, and those of asyncrl in children beside them, which may
# start sandboxes of their own.


MakePool = Callable[[Sequence[FunctionSpec], Containment | None], ChildPool]


class SplitPool:
    """Has the methods of `ChildPool`, with one of them for each kind of function that there is. containment: of the
    user's functions; None: nothing contains them."""

    def __init__(self, specs: Sequence[FunctionSpec], containment: Containment | None, make: MakePool) -> None:
        self.specs = tuple(specs)
        contained = [containment if spec.is_users else None for spec in self.specs]
        self._pools: list[ChildPool] = []
        self._places: dict[int, tuple[ChildPool, int]] = {}
        for kind in dict.fromkeys(contained):
            numbers = [number for number, each in enumerate(contained) if each is kind]
            pool = make([self.specs[number] for number in numbers], kind)
            self._pools.append(pool)
            self._places |= {number: (pool, place) for place, number in enumerate(numbers)}

    @property
    def finished(self) -> int:
        """Samples scored so far, by all functions."""
        return sum(pool.finished for pool in self._pools)

    @property
    def queued(self) -> int:
        """Calls that wait for their turn."""
        return sum(pool.queued for pool in self._pools)

    async def start(self) -> None:
        """Starts a child of each kind; raises as `ChildPool.start` does."""
        async with AsyncExitStack() as unless_started:
            for pool in self._pools:
                await pool.start()
                unless_started.push_async_callback(pool.stop)
            unless_started.pop_all()

    async def stop(self) -> None:
        """Kills all children; calls that still run end with a result that says so."""
        for pool in self._pools:
            await pool.stop()

    async def run(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Returns the result of function number `function` for each sample; errors of the function are results too."""
        pool, place = self._places[function]
        return await pool.run(place, samples)
