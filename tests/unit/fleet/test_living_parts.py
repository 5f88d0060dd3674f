"""Ranks that give their parts of a trainer's state, or all of it, after one died."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.errors import JournalError, PeerLost, Refused
from asyncrl.fleet.changes import living_state
from asyncrl.fleet.changes.living_parts import LivingParts
from asyncrl.fleet.changes.living_state import holders_of_all
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.service_contracts import EndpointSpec, Training

POSITION = (1, 7)


@dataclass
class FakeRank:
    """Leaves the others once `waits_for` is ended. ended: its process is. fails: a method that raises Refused."""

    number: int
    part: int
    waits_for: "FakeRank | None" = None
    fails: str = ""
    chain: str = "c0ffee"
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"training0.{self.number}"

    async def call(self, spec: EndpointSpec, args: Any, deadline: float) -> Checkpointed | None:
        if self.ended.is_set():
            raise PeerLost(f"{self.name} is gone")
        self.calls.append(spec.name)
        if spec.name == self.fails:
            raise Refused(f"{self.name} holds another version")
        if spec.name == "leave_ranks" and self.waits_for is not None:
            await self.waits_for.ended.wait()
        if spec.name != "checkpoint":
            return None
        assert args == ("folder", *POSITION)
        return Checkpointed(POSITION[1], self.chain, {f"part-{self.part}": self.name})


async def written(*ranks: FakeRank, parts: int = 2) -> list[dict[str, str]]:
    """Returns the files that ranks wrote, of each part."""
    instances = {each.name: SimpleNamespace(launched=SimpleNamespace(kill=each.ended.set)) for each in ranks}
    holders = [(each.part, each) for each in ranks]
    living = LivingParts(cast(Any, holders), parts, POSITION, 60.0, cast(Any, instances))
    async with asyncio.timeout(20.0):
        return [each.files for each in await living.write("folder")]


async def test_a_rank_that_waits_for_a_living_one_gives_its_part_once_that_is_ended() -> None:
    first = FakeRank(0, 0)
    second = FakeRank(2, 0, first)
    third = FakeRank(3, 1, second)
    assert await written(first, second, third) == [{"part-0": "training0.0"}, {"part-1": "training0.3"}]
    assert second.calls == ["leave_ranks"], "its part was there"


async def test_a_rank_that_never_answers_is_not_waited_for_where_others_have_all_parts() -> None:
    hangs = FakeRank(2, 0, FakeRank(9, 9))
    assert len(await written(hangs, FakeRank(0, 0), FakeRank(3, 1))) == 2
    assert hangs.ended.is_set()


@pytest.mark.parametrize("fails", ["leave_ranks", "copy_state", "checkpoint"])
async def test_a_part_that_nobody_gives_is_named(fails: str) -> None:
    named = r"^no living rank gave part 1 of the 2 parts of the trainer's state: training0\.3 holds another version$"
    with pytest.raises(Refused, match=named):
        await written(FakeRank(0, 0), FakeRank(2, 0), FakeRank(3, 1, fails=fails))


@pytest.mark.parametrize("fails", ["copy_state", "checkpoint"])
async def test_a_rank_that_leaves_later_gives_the_part_that_the_first_could_not_write(fails: str) -> None:
    first = FakeRank(0, 0, fails=fails)
    assert {"part-0": "training0.2"} in await written(first, FakeRank(2, 0, first), FakeRank(3, 1))


async def test_a_part_is_taken_from_another_rank_where_the_first_no_longer_holds_the_version() -> None:
    files = await written(FakeRank(0, 0, fails="leave_ranks"), FakeRank(2, 0), FakeRank(3, 1))
    assert files[0] == {"part-0": "training0.2"}


async def test_ranks_that_trained_different_samples_save_nothing() -> None:
    with pytest.raises(JournalError, match=r"at version 7 with different chains \['beef', 'c0ffee'\]"):
        await written(FakeRank(0, 0), FakeRank(3, 1, chain="beef"))


async def holders(*ranks: FakeRank) -> list[str]:
    return [each.name for each in await holders_of_all(cast(Any, ranks), Training, *POSITION)]


async def test_all_ranks_that_hold_the_whole_state_stay_but_for_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(living_state, "LATER_HOLDERS", 0.0)
    hangs, another_version = FakeRank(3, 0, FakeRank(9, 9)), FakeRank(4, 0, fails="leave_ranks")
    first = FakeRank(0, 0)
    async with asyncio.timeout(20.0):
        assert await holders(another_version, first, hangs) == [first.name]
        assert await holders(another_version) == []


async def test_no_rank_is_left_out_that_answers_later_than_the_first_one() -> None:
    first = FakeRank(0, 0)
    second = FakeRank(2, 0, first)
    asyncio.get_running_loop().call_later(0, lambda: asyncio.get_running_loop().call_soon(first.ended.set))
    async with asyncio.timeout(20.0):
        assert await holders(first, second) == [first.name, second.name]
