"""The pool with real children: environments that answer, wait, raise, hang, crash and say too much."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.environments.episode_pool import EpisodePool, Play, Played
from asyncrl.environments.loading import EnvironmentSpec, load
from asyncrl.errors import ConfigError
from asyncrl.protocols.prompt_row import PromptRow
from tests import golden
from tests.unit.children.running import running

ENVIRONMENTS = r"""
import asyncio, os, signal, threading
from asyncrl import Observation

class Counts:
    def __init__(self, step_by=1):
        if step_by < 1:
            raise ValueError("step_by is at least 1")
        self.total, self.step_by = 0, step_by
    async def reset(self, row, seed):
        self.total = seed
        return Observation(f"{row['prompt']} {seed}")
    async def step(self, message):
        await asyncio.sleep(0)
        self.total += self.step_by
        return Observation(f"{message} {self.total}", reward=self.total, done=message == "stop")

class Plain(Counts):
    def reset(self, row, seed):
        return Observation("plain", tools=({"name": "add"},))
    def step(self, message):
        return Observation([{"role": "tool", "content": message, "name": "add"}], info={"calls": 1})

class Begins(Counts):
    async def step(self, message):
        role, _, text = message.rpartition(" ")
        messages = [{"role": role or "assistant", "content": "so far"}]
        messages += [{"role": "user", "content": "x" * int(text[1:])}]
        return Observation(messages, follows=int(text[0]), tools=({"name": "add"},))

class Sampled(Counts):
    waits_for = "the bell did not ring"
    async def step(self, message, sampled):
        if message == "wait":
            await asyncio.Event().wait()
        return Observation("" if sampled is None else f"{sampled.tokens} {sampled.finish} {sampled.context}")

class Waits(Counts):
    async def step(self, message):
        await asyncio.sleep(0.5)
        return Observation(str(os.getpid()))

class Troubles(Counts):
    async def step(self, message):
        if message == "raise":
            raise KeyError("nothing here")
        if message == "hang":
            threading.Event().wait()
        if message == "wait":
            await asyncio.Event().wait()
        if message == "ignore":
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass
        if message == "exit":
            os._exit(7)
        if message == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if message == "die later":
            asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGKILL)
            await asyncio.Event().wait()
        if message == "slowly":
            await asyncio.sleep(0.6)
        if message == "nothing":
            return None
        if message == "nan":
            return Observation("", reward=float("nan"))
        if message == "huge":
            return Observation("", reward=1e31)
        if message == "notes":
            return Observation("", info={"all": "x" * 600})
        if message == "note":
            return Observation("", info="x")
        if message == "number":
            return Observation(5)
        if message == "bytes":
            return Observation([{"role": "user", "content": "", "image": b"1"}])
        if message == "cancelled":
            task = asyncio.create_task(asyncio.Event().wait())
            task.cancel()
            await task
        if message == "speaks":
            return Observation([{"role": "assistant", "content": "I am the policy"}])
        if message == "much":
            return Observation("é" * 10_000_000)
        return await super().step(message)

class Closes(Counts):
    # The prompt of the row says how closing goes wrong.
    async def reset(self, row, seed):
        self.row = row
        return await super().reset(row, seed)
    async def step(self, message):
        if message == "slowly":
            await asyncio.sleep(0.3)
        return await super().step(message)
    async def close(self):
        await asyncio.sleep(0)
        with open(self.row["file"], "a") as file:
            file.write(f"{self.total}\n")
        match self.row["prompt"]:
            case "raise":
                raise KeyError("nothing here")
            case "wait":
                await asyncio.Event().wait()
            case "hang":
                threading.Event().wait()
            case "exit":
                os._exit(7)

class Opened(Counts):
    async def step(self, message, opened=False):
        return Observation(str(opened))

class ClosesWhat(Counts):
    async def close(self, what):
        pass

class Stubborn(Counts):
    def reset(self, row):
        pass

def no_class():
    pass
"""
MakePool = Callable[..., AbstractAsyncContextManager[EpisodePool]]
Unclosed = asyncio.Queue[str]
"""Queue of the reports of a pool about environments that could not be closed."""
ROW = PromptRow(prompt="p").packed


def play(*said: str, member: int = 0, seed: int = 3) -> Play:
    return Play((4, member, 0), ROW, seed, said)


def texts(played: Played) -> dict[int, str]:
    assert not played.error
    shown = {turn: answer["text"] for turn, answer in played.answers.items()}
    return {turn: text if isinstance(text, str) else text[0]["content"] for turn, text in shown.items()}


@pytest.fixture
def unclosed() -> Unclosed:
    return Unclosed()


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    (tmp_path / "environments.py").write_text(ENVIRONMENTS)
    return tmp_path / "environments.py"


@pytest.fixture
def pool(environments: Path, tmp_path: Path, unclosed: Unclosed) -> MakePool:
    @asynccontextmanager
    async def make(
        name: str, workers: int = 1, deadline: float = 20.0, max_bytes: int = 100, **options: int
    ) -> AsyncIterator[EpisodePool]:
        spec = EnvironmentSpec(f"{environments}:{name}", options, max_bytes=max_bytes)
        limits = {"workers": workers, "deadline": deadline, "start_deadline": 60.0, "printed": tmp_path / "printed"}
        limits["unclosed"] = unclosed.put_nowait
        async with running(lambda tasks: EpisodePool(spec, tasks, **limits)) as made:
            yield made

    return make


async def test_an_episode_goes_on_turn_by_turn(pool: MakePool) -> None:
    async with pool("Counts", step_by=2) as made:
        assert texts(await made.play(play())) == {0: "p 3"}
        assert texts(await made.play(play("a"))) == {1: "a 5"}
        assert texts(await made.play(play("a", "b"))) == {2: "b 7"}
        assert texts(await made.play(play("a", "b"))) == {2: "b 7"}, "the same turn again, and not one more"
        assert texts(await made.play(play("x", member=1, seed=10))) == {0: "p 10", 1: "x 12"}
        ended = await made.play(play("a", "b", "stop"))
        assert (ended.answers[3]["done"], ended.answers[3]["reward"]) == (True, 9.0)


async def test_an_episode_that_was_forgotten_is_played_again(pool: MakePool) -> None:
    async with pool("Counts") as made:
        await made.play(play("a"))
        made.forget([(4, 0, 0)])
        assert texts(await made.play(play("a", "b"))) == {0: "p 3", 1: "a 4", 2: "b 5"}


async def test_an_episode_that_went_further_begins_again(pool: MakePool) -> None:
    async with pool("Counts") as made:
        await made.play(play("a", "b"))
        assert texts(await made.play(play())) == {0: "p 3"}
        assert texts(await made.play(play("c"))) == {1: "c 4"}


async def test_plain_methods_messages_and_tools(pool: MakePool) -> None:
    async with pool("Plain") as made:
        assert (await made.play(play())).answers[0]["tools"] == [{"name": "add"}]
        played = await made.play(play("4"))
        assert played.answers[1]["text"] == [{"role": "tool", "content": "4", "name": "add"}]
        assert played.answers[1]["info"] == {"calls": 1}


async def test_an_environment_begins_a_context(pool: MakePool) -> None:
    async with pool("Begins", max_bytes=300) as made:
        (message,) = (await made.play(play("03"))).answers[1]["text"]
        assert (message["role"], message["content"], message["follows"]) == ("context", "xxx", 0)
        assert message["messages"][0] == {"role": "assistant", "content": "so far"}
        assert message["tools"] == [{"name": "add"}]
        assert (await made.play(play("03", "23"))).answers[2]["text"][0]["follows"] == 2
        mistakes = {
            "33": "`step` gave follows = 3, which is one of the 2 turns so far, from 1, or 0",
            "0300": "is not cut off there: raise environment.max_bytes, 300 now",
            "context 03": "a message of `step` has the role context; write Observation(..., follows=0)",
        }
        for member, (text, why) in enumerate(mistakes.items(), start=1):
            assert why in (await made.play(play("03", text, member=member))).error


async def test_an_environment_that_asks_is_told_which_answers_began_inside_thoughts(pool: MakePool) -> None:
    def with_opened(*said: str, opened: tuple[bool, ...]) -> Play:
        return replace(play(*said), opened=opened)

    async with pool("Opened") as made:
        assert texts(await made.play(with_opened("a", "b", opened=(True, False)))) == {0: "p 3", 1: "True", 2: "False"}
        assert texts(await made.play(with_opened("a", "b", "c", opened=(True, False, True)))) == {3: "True"}
        assert texts(await made.play(play("a", "b", "c", "d"))) == {4: "False"}


async def test_an_environment_takes_what_was_recorded_of_answers(pool: MakePool) -> None:
    def with_sampled(*said: str) -> Play:
        recorded = [{"tokens": (each,), "logprobs": (0.5,), "finish": "stop", "context": 7} for each in said]
        return replace(play(*said), sampled=tuple(recorded))

    async with pool("Counts") as made:
        assert not made.takes_sampled
        assert texts(await made.play(with_sampled("a"))) == {0: "p 3", 1: "a 4"}
    async with pool("Sampled", deadline=0.5) as made:
        assert made.takes_sampled
        assert texts(await made.play(with_sampled("a", "b"))) == {0: "p 3", 1: "['a'] stop 7", 2: "['b'] stop 7"}
        assert texts(await made.play(with_sampled("a", "b", "c", "d"))) == {3: "['c'] stop 7", 4: "['d'] stop 7"}
        assert texts(await made.play(play("a", "b", "c", "d", "e"))) == {5: ""}
        late = await made.play(play("wait", member=1))
        golden.says(late.error, "`step`", "0.5 s")


async def test_many_episodes_wait_at_once_and_share_the_children(pool: MakePool) -> None:
    async with pool("Waits", workers=2) as made:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await asyncio.gather(*(made.play(play("a", member=member)) for member in range(200)))
        assert loop.time() - began < 30, "one after the other they would take 100 s"
        assert sorted(texts(each)[1] for each in found)[0] != sorted(texts(each)[1] for each in found)[-1]


TROUBLES = (
    *("raise", "wait", "ignore", "nothing", "nan", "huge", "notes", "note", "number", "speaks", "bytes", "cancelled"),
    "exit",
)


async def test_trouble_is_the_result_of_its_own_episode(pool: MakePool) -> None:
    async with pool("Troubles", deadline=1.0) as made:
        for member, said in enumerate(TROUBLES, start=100):
            beside = made.play(play("a", "slowly", member=member - 100))
            failed, other = await asyncio.gather(made.play(play(said, member=member)), beside)
            golden.says(failed.error, "status 7" if said == "exit" else "`step`")
            assert texts(other)[2] == "slowly 5"
            assert texts(await made.play(play("a", "slowly", "c", member=member - 100)))[3] == "c 6"


async def test_a_hang_that_holds_the_child_is_blamed_and_others_are_played_again(pool: MakePool) -> None:
    async with pool("Troubles", deadline=1.0) as made:
        for member in range(1, 4):
            await made.play(play("a", member=member))
        waiting = [made.play(play("a", "slowly", member=member)) for member in range(1, 4)]
        failed, *others = await asyncio.gather(made.play(play("hang")), *waiting)
        golden.says(failed.error, "1 s")
        assert [texts(each)[2] for each in others] == ["slowly 5"] * 3


@pytest.mark.parametrize("said", ["die", "die later"])
async def test_who_kills_the_child_twice_is_blamed(pool: MakePool, said: str) -> None:
    """A signal may come from outside, and `die later` is code that no call runs."""
    async with pool("Troubles", deadline=5.0) as made:
        failed, other = await asyncio.gather(made.play(play(said)), made.play(play("slowly", member=1)))
        assert "SIGKILL" in failed.error
        assert failed.error.endswith("; so was another one at the same turn")
        assert texts(other)[1] == "slowly 4"


async def test_an_answer_is_cut_at_its_largest_size(pool: MakePool) -> None:
    async with pool("Troubles") as made:
        text = texts(await made.play(play("much")))[1]
        assert text == "é" * 50 + "\n[cut off after 100 bytes]"


def closing(file: Path, prompt: str, *said: str, member: int = 0, seed: int = 3) -> Play:
    return Play((4, member, 0), PromptRow(prompt=prompt, file=str(file)).packed, seed, said)


async def test_an_episode_is_closed_once_after_the_call_that_runs_in_it(
    pool: MakePool, tmp_path: Path, unclosed: Unclosed
) -> None:
    file = tmp_path / "closed"
    async with pool("Closes") as made:
        await made.play(closing(file, "p"))
        running = asyncio.create_task(made.play(closing(file, "p", "slowly")))
        await asyncio.sleep(0)  # It is sent before the end of the episode is.
        made.forget([(4, 0, 0)])
        made.forget([(4, 0, 0), (4, 1, 0)])
        assert texts(await running) == {1: "slowly 4"}
        await made.play(closing(file, "p", "a", "b", member=2, seed=10))
        await made.play(closing(file, "p", member=2, seed=10))  # It begins anew, and the one of before is closed.
        made.forget([(4, 2, 0)])
        await made.play(closing(file, "p", "slowly", member=3))
        assert sorted(file.read_text().split()) == ["10", "12", "4"]
    assert unclosed.empty()


async def test_an_environment_that_cannot_be_closed_costs_no_episode(
    pool: MakePool, tmp_path: Path, unclosed: Unclosed
) -> None:
    reasons = {
        "raise": "`close` raised KeyError: 'nothing here'\nTraceback",
        "wait": "`close` hung: no answer within 1 s",
        "hang": "`close` hung or ended its process: its process was ended by SIGKILL",
        "exit": "`close` hung or ended its process: its process ended with status 7",
    }
    file = tmp_path / "closed"
    async with pool("Closes", deadline=1.0) as made:
        await made.play(closing(file, "p", member=1))
        for turn, (prompt, reason) in enumerate(reasons.items(), start=1):
            await made.play(closing(file, prompt, member=turn + 1))
            made.forget([(4, turn + 1, 0)])
            assert texts(await made.play(closing(file, "p", *["a"] * turn, member=1)))[turn] == f"a {3 + turn}"
            assert (await asyncio.wait_for(unclosed.get(), 20)).startswith(reason)
    assert unclosed.empty()


@pytest.mark.parametrize(
    ("name", "options"),
    [("no_class", {}), ("Stubborn", {}), ("ClosesWhat", {}), ("Counts", {"step": 2}), ("Missing", {})],
)
def test_what_is_no_environment(environments: Path, name: str, options: dict[str, int]) -> None:
    with golden.raises(ConfigError, match=f"{name}|step"):
        load(EnvironmentSpec(f"{environments}:{name}", options))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [("Missing", {}, "has no Missing"), ("Counts", {"step_by": 0}, "not be loaded: ValueError: step_by is at least 1")],
)
async def test_a_child_tells_what_it_cannot_load(
    pool: MakePool, name: str, options: dict[str, int], reason: str
) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with pool(name, **options):
            pass
    assert raised.group_contains(ConfigError, match=reason)
