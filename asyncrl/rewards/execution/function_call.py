"""Calls a reward function and checks its result: the one place where the user's code may raise anything."""

import asyncio
import ctypes
import inspect
import io
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from asyncrl.children.child_messages import trace, where_to_write
from asyncrl.errors import RewardError
from asyncrl.protocols.batch import LARGEST_REWARD
from asyncrl.rewards.sample import Function, FunctionResult, Logged, RowError, Sample, UnjudgedError, with_columns


async def attempt(
    function: Function, samples: list[Sample], group: bool, deadline: float, *, by_token: bool = False
) -> list[FunctionResult]:
    """Calls as `call` does, and turns errors into results. deadline: seconds; it cannot end a plain function."""
    try:
        async with asyncio.timeout(deadline) as scope:
            return await call(function, samples, group, by_token)
    except Exception as error:  # the user's code: its errors are results of its samples
        if scope.expired():
            result = FunctionResult(reason=f"it hung: no answer within {deadline:g} s{_waiting_in(error)}")
        elif isinstance(error, RewardError):
            of_row = isinstance(error, RowError)
            unjudged = isinstance(error, UnjudgedError)
            result = FunctionResult(reason=str(error), of_row=of_row, unjudged=unjudged)
        else:
            advice = _other_argument(error, group) or where_to_write(error)
            reason = f"it raised {type(error).__name__}: {error}{advice}"
            result = FunctionResult(reason=reason, traceback=trace(error))
        return [replace(result, failed_together=len(samples) if group else 0)] * len(samples)


async def call(function: Function, samples: list[Sample], group: bool, by_token: bool = False) -> list[FunctionResult]:
    """Returns one result for each sample; without `group` there is exactly one sample. by_token: a result has a reward
    for each sampled token. Raises errors of the function as they are, and RewardError if a group function returned
    another number of rewards."""
    result = function(samples if group else samples[0])
    if inspect.isawaitable(result):
        result = await result
    if not group:
        return [_result(result, samples[0], by_token)]
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
        raise RewardError(f"a group function returns a list of {len(samples)} rewards, this is {repr(result)[:80]}")
    if len(result) != len(samples):
        raise RewardError(f"it was given {len(samples)} samples and returned {len(result)} rewards")
    return [_result(value, sample, by_token) for value, sample in zip(result, samples, strict=True)]


def _other_argument(error: Exception, group: bool) -> str:
    """Returns what to write where an error says that a function of groups got a sample, or one of samples a list."""
    text = str(error)
    if isinstance(error, TypeError) and not group and "'Sample'" in text:
        return "; a function that takes all samples of a group needs group = true"
    if isinstance(error, AttributeError) and group and text.startswith("'list' object"):
        return "; with group = true it gets a list of samples: remove that for a function of one sample"
    return ""


def _waiting_in(error: Exception) -> str:
    """Returns where the function was when it was cancelled: the last line of the file it began in."""
    frames = traceback.extract_tb(error.__context__.__traceback__) if error.__context__ is not None else []
    of_the_user = [frame for frame in frames if frame.filename != __file__]
    lines = [frame for frame in of_the_user if frame.filename == of_the_user[0].filename]
    return f", waiting in {lines[-1].filename}, line {lines[-1].lineno}" if lines else ""


def _result(value: Any, sample: Sample, by_token: bool) -> FunctionResult:
    return token_result_of(value, sample.tokens) if by_token and value is not None else result_of(value)


def token_result_of(value: Any, tokens: int) -> FunctionResult:
    """Makes a result of the rewards of a sample's tokens, with a reason if they are not one number for each."""
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__"):
        return FunctionResult(reason=f"with by_token = true it returns a list, this is {repr(value)[:80]}")
    if len(value) != tokens:
        return FunctionResult(reason=f"it returned {len(value)} rewards for the {tokens} tokens of the sample")
    try:
        rewards = tuple(_number(each, f"the reward of token {number}") for number, each in enumerate(value))
    except RewardError as error:
        return FunctionResult(reason=str(error))
    total = sum(rewards)
    if not math.isfinite(total):
        return FunctionResult(reason=f"the sum of its rewards is {total}")
    return FunctionResult(total, tokens=rewards)


def result_of(value: Any) -> FunctionResult:
    """Makes a result of a returned value, with a reason if the value is not a reward."""
    if isinstance(value, Logged):
        try:
            logged = {name: _number(term, f"the metric {name}") for name, term in value.terms.items()}
        except RewardError as error:
            return FunctionResult(reason=str(error))
        return replace(result_of(value.value), logged=logged)
    if value is None:
        return FunctionResult(reason="it returned None")
    if isinstance(value, dict) and not value:
        return FunctionResult(reason="it returned an empty dict; return None for a sample that cannot be scored")
    try:
        if isinstance(value, dict):
            return FunctionResult({str(name): _number(term, f"the term {name}") for name, term in value.items()})
        return FunctionResult(_number(value, "what it returned"))
    except RewardError as error:
        return FunctionResult(reason=str(error))


def _number(value: Any, what: str) -> float:
    """Converts a finite number, also an array or tensor of one, to a float; raises RewardError for anything else."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    while plain is not value and isinstance(plain, list) and len(plain) == 1:
        (plain,) = plain
    if isinstance(plain, str | bytes) or not hasattr(plain, "__float__"):
        advice = "; a list of rewards, one for each token, needs by_token = true" if isinstance(plain, list) else ""
        raise RewardError(f"{what} is not a number but {repr(value)[:80]}{advice}")
    number = float(plain)
    if not abs(number) <= LARGEST_REWARD:
        raise RewardError(f"{what} is {number:g}; a reward is finite, and {LARGEST_REWARD:g} at most")
    return number


# Calls functions that only this process has in copies of it, from which nothing gets out but what they return.


NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000
"""Flags of unshare(2): users, mounts, network."""
MOUNT_SETATTR = 442
HERE = -100
RECURSIVE = 0x8000
READ_ONLY = (ctypes.c_uint64 * 4)(1, 0, 0, 0)
"""The system call that makes all mounts read-only, and its arguments."""
OPEN = "this machine lets no process leave files and network (user namespaces)"
EXCERPT = 300


@dataclass(frozen=True, slots=True)
class ProcessCopies:
    """Has the method `run` of `ChildPool`. deadline: seconds of a function for all samples of a call."""

    functions: Sequence[Function]
    deadline: float

    async def run(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Returns the result of function number `function` for each sample. What it keeps, prints, or writes to files
        or a network is lost with the copy; what it needs of both it lacks."""
        return await asyncio.to_thread(self._run, self.functions[function], samples)

    def _run(self, function: Function, samples: Sequence[Sample]) -> list[FunctionResult]:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            _answer(writer, function, samples, self.deadline)
        os.close(writer)
        with open(reader, "rb") as answered:
            text = answered.read()
        os.waitpid(child, 0)
        if not text:
            return [FunctionResult(reason=f"it gave no answer within {self.deadline:g} s")] * len(samples)
        return [FunctionResult(value, reason) for value, reason in json.loads(text)]


def _answer(writer: int, function: Function, samples: Sequence[Sample], deadline: float) -> NoReturn:
    """Calls the function in a copy of the process, and ends the copy."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(deadline))
        sys.stdout = sys.stderr = io.StringIO()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        system = ctypes.CDLL(None)
        if system.unshare(NEW_NAMESPACES) or system.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, READ_ONLY, 32):
            results = [FunctionResult(reason=OPEN)] * len(samples)
        else:
            calls = (attempt(function, [with_columns(sample)], False, deadline) for sample in samples)
            results = [asyncio.run(call)[0] for call in calls]
        os.write(writer, json.dumps([(each.value, each.reason[:EXCERPT]) for each in results]).encode())
    finally:
        os._exit(0)
