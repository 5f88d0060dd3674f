"""The sample tracker releases rows as soon as they are no longer needed."""

from dataclasses import replace

import pytest

from asyncrl.config.gate_config import GateConfig
from asyncrl.controller import sample_tracker
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.iterations import Iterations
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.ledger import Dropped
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.controller.observers.events import Event
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.lanes.control.message_codec import decode, encode
from asyncrl.objectives.advantages import group_baseline
from asyncrl.protocols.batch import BatchRef, Place, RowRef, SampleName
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Reply, Score
from tests.instruction_count import counting
from tests.unit.scene import settings

CONFIG = GateConfig(groups=1, members=4, limit=2, policy="mask", slots=8, cut_at=2)


def row(group: int, member: int) -> RowRef:
    place = Place("shm://generation0.0-0-1.rows", 4 * group + member, 1, ("text",))
    return RowRef(group, member, 0, 0, 1, 1, 0, 0, "stop", (place,))


class Tracked(SampleTracker):
    """A tracker over a gate and an empty journal. released, woken, drawing, events: what it hands on."""

    def __init__(self, config: GateConfig = CONFIG) -> None:
        self.released: list[SampleName] = []
        self.woken: list[int] = []
        self.drawing: list[int] = []
        self.events: list[Event] = []
        super().__init__(
            Gate(config),
            Journal(MemoryStore()),
            self.events.append,
            lambda names: self.released.extend(names),
            changed=lambda: self.drawing.append(1),
            ready=lambda: self.woken.append(1),
        )

    def score(self, each: RowRef, score: Score) -> None:
        """Takes a sample, and its score."""
        self.generated([each])
        self.scored(each, score)


def test_trained_rows_are_released_while_a_straggler_of_their_group_runs() -> None:
    """A full batch of parts of groups: what is in the loss needs no slot, however long the stragglers take."""
    tracker = Tracked()
    groups = [tracker.draw(), tracker.draw()]
    for group in groups:
        for member in (0, 1):
            tracker.score(row(group, member), Score(float(member), {}))

    cuts = tracker.pick()
    assert cuts == ((0, (0, 1)), (1, (0, 1)))
    keys = [(group, member, 0) for group, members in cuts for member in members]
    tracker.trained(cuts, 1, (0.0,) * 4, chain(GENESIS, keys).hex())

    assert sorted(tracker.released) == keys
    assert tracker.gate.groups() == (0, 1), "their stragglers still run"
    assert [sample.row for group in groups for sample in tracker.gate.group(group).samples] == [None] * 8
    assert not tracker.groups_at("generation0.0-0-1"), "a death there costs what was trained nothing"


def test_a_batch_of_exactly_the_samples_wanted_is_worth_picking_while_others_run() -> None:
    """Nothing else would wake the trainer until a further sample is ready."""
    tracker = Tracked()
    groups = [tracker.draw(), tracker.draw()]
    for number, (group, member) in enumerate((group, member) for group in groups for member in (0, 1)):
        assert len(tracker.woken) == 0, f"{number} samples are no batch"
        tracker.score(row(group, member), Score(float(member), {}))
    assert len(tracker.woken) == 1
    assert not tracker.drawing, "a score makes no room for a group"
    assert tracker.pick() == ((0, (0, 1)), (1, (0, 1)))


def test_rows_in_flight_share_their_texts() -> None:
    """Each row arrives in a message of its own, with its own copies of the owner's address and of the column names."""
    tracker = Tracked()
    group = tracker.draw()
    rows = [decode(encode(Reply(0, BatchRef((row(group, member),))))).value.rows[0] for member in (0, 1, 2)]
    assert rows[0].places[0].owner is not rows[1].places[0].owner
    for each in rows:
        tracker.generated([each])
    tracker.scored(rows[0], Score(1.0, {}))
    kept = [sample.row for sample in tracker.gate.group(group).samples[:3]]
    assert [found and found.with_reward(None) for found in kept] == rows
    places = [found.places[0] for found in kept if found is not None]
    assert len({id(place.owner) for place in places}) == len({id(place.columns) for place in places}) == 1


def test_what_a_worker_may_have_made_unheard_is_released_too() -> None:
    """An answer that crosses the end of its call is known to nobody here; that of the next attempt is not touched."""
    tracker = Tracked()
    group = tracker.draw()
    tracker.restart(group, "its worker died")
    assert tracker.released == [(group, member, 0) for member in range(4)]
    tracker.released.clear()

    tracker.generated([row(group, 0), row(group, 1)._replace(attempt=1)])
    assert tracker.released == [(group, 0, 0)], "a late answer"
    tracker.generated([row(group, 1)._replace(attempt=1)])
    assert tracker.released == [(group, 0, 0)], "a repeated answer is the row that waits for training"
    tracker.released.clear()

    tracker.drop(group, (2, 3), "stale")
    assert tracker.released == [(group, 2, 1), (group, 3, 1)]


def answered_row(member: int, *, attempt: int = 0, last: int = 0, owner: str = "environment0.0-0-1") -> RowRef:
    """Returns the row of an episode of group 0 that goes on."""
    place = Place(f"shm://{owner}.rows", member, 1, ("text",))
    return RowRef(0, member, attempt, 0, 1, 4, 0, last, "", (place,), turns=2, given=1)


def test_columns_of_an_old_attempt_are_freed_and_replace_nothing() -> None:
    tracker = Tracked()
    group = tracker.draw()
    tracker.restart(group, "its worker died")
    newest = row(group, 0)._replace(attempt=1)
    tracker.generated([newest])
    tracker.released.clear()
    values = Place("shm://critic0.0-0-1.rows", 0, 1, ("values",))
    tracker.holds(row(group, 0).stored_at(values))
    assert tracker.released == [(group, 0, 0)]
    assert tracker.gate.group(group).samples[0].row == newest
    tracker.holds(newest.stored_at(values))
    assert tracker.gate.group(group).samples[0].row == newest.stored_at(values)


def test_only_the_row_that_the_journal_knows_is_restored() -> None:
    tracker = Tracked()
    ready = row(tracker.draw(), 0)
    tracker.score(ready, Score(1.0, {}))
    sample = tracker.gate.group(ready.group).samples[0]
    sample.row = None
    for other in (ready.with_reward(0.5), ready.with_reward(1.0)._replace(attempt=1)):
        tracker.restored(other)
        assert sample.row is None
    tracker.restored(ready.with_reward(1.0))
    assert sample.row == ready.with_reward(1.0)


def test_a_checkpoint_saves_what_waits_for_training_and_then_episodes_that_were_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = Tracked()
    group = tracker.draw()
    tracker.answered([answered_row(0), answered_row(1), answered_row(2)])
    tracker.generated([row(group, 0), row(group, 3)])
    tracker.scored(row(group, 3), Score(1.0, {}))
    assert [each.name for each in tracker.rows_to_save()] == [(0, 3, 0), (0, 1, 0), (0, 2, 0)]
    with monkeypatch.context() as patched:
        patched.setattr(sample_tracker, "MOST_SAVED", 2)
        assert [each.name for each in tracker.rows_to_save()] == [(0, 3, 0), (0, 1, 0)]
    tracker.restart(group, "a worker died")
    assert [each.name for each in tracker.rows_to_save()] == [], "the journal knows the new attempt, and not the rows"
    tracker.answered([answered_row(2, attempt=1)])
    assert [each.name for each in tracker.rows_to_save()] == [(0, 2, 1)]


def test_the_next_attempt_goes_on_from_restored_turns_of_its_own_sample_only() -> None:
    tracker = Tracked()
    group = tracker.draw()
    tracker.restart(group, "resumed")
    tracker.generated([row(group, 3)._replace(attempt=1)])
    tracker.released.clear()
    good = answered_row(0, owner="generation0.0-1-9")
    refused = [answered_row(1, attempt=1), answered_row(2, last=1), answered_row(3)]
    for each in (good, *refused):
        tracker.turns_restored(each)
    assert tracker.take_answered(group) == [good]
    assert tracker.released == [each.name for each in refused], "of this attempt, of a later version, no longer running"


def test_the_groups_of_a_dead_worker_are_found_among_its_own() -> None:
    """A lost node may take many workers at once, and each of them holds rows of few groups."""
    few = _instructions_to_find_groups(2)
    many = _instructions_to_find_groups(200)
    assert many <= 1.1 * few


def _instructions_to_find_groups(elsewhere: int) -> int:
    tracker = Tracked(replace(CONFIG, groups=elsewhere + 1))
    for _ in range(elsewhere):
        tracker.generated([row(tracker.draw(), 0)])
    mine = tracker.draw()
    place = Place("shm://generation1.0-0-1.rows", 0, 1, ("text",))
    tracker.generated([row(mine, 0)._replace(places=(place,))])
    with counting() as count:
        assert tracker.groups_at("generation1.0-0-1") == [mine]
    tracker.drop(mine, (0, 1, 2, 3), "poison")
    assert tracker.groups_at("generation1.0-0-1") == []
    return count.instructions


@pytest.mark.parametrize("discount", [None, 0.5])
async def test_a_batch_has_the_advantages_of_turns_where_the_config_asks_for_them(discount: float | None) -> None:
    tracker = Tracked()
    config = settings(3, algorithm={"normalize_std": False, "turn_discount": discount})
    iterations = Iterations(tracker, group_baseline, config, lambda cuts, lost: None)
    groups = [tracker.draw(), tracker.draw()]
    for group in groups:
        for member, turns in enumerate(((1.0, 3.0), (0.0, 1.0))):
            episode = row(group, member)._replace(turns=2, given=5)
            tracker.score(episode, Score(sum(turns), {}, "", turns))
    cuts = tracker.pick()
    assert cuts is not None
    with iterations.begin(cuts) as running:
        batch = running.batch
    assert [found.turn_rewards for found in batch][:2] == [(1.0, 3.0), (0.0, 1.0)]
    assert [(found.turns, found.given) for found in batch] == [(2, 5)] * 4
    expected = [(), ()] if discount is None else [pytest.approx((1.0, 1.0)), pytest.approx((-1.0, -1.0))]
    assert [found.turn_advantages for found in batch][:2] == expected


@pytest.mark.parametrize("discount", [None, 0.9])
def test_an_experiment_keeps_equal_totals_of_unequal_turns_that_it_learns_from(discount: float | None) -> None:
    config = settings(3, algorithm={"preset": "dapo", "turn_discount": discount})
    tracker = Tracked(replace(GateConfig.of(config), groups=1, members=2, cut_at=2))
    group = tracker.draw()
    for member, turns in enumerate(((1.0, 0.0), (0.0, 1.0))):
        episode = row(group, member)._replace(turns=2, given=5)
        tracker.score(episode, Score(1.0, {}, "", turns))
    assert tracker.pick() == (None if discount is None else ((group, (0, 1)),))
    assert tracker.gate.finished(group) == (discount is None)


def test_the_rewards_of_tokens_are_part_of_the_row_and_freed_with_a_refused_score() -> None:
    tracker = Tracked()
    group = tracker.draw()
    place = Place("shm://reward0.0-0-1.rows", 3, 1, ("token_rewards",))
    tracker.score(row(group, 0), Score(1.0, {}, place=place))
    (kept,) = tracker.rows(group, (0,))
    assert kept.place_of("token_rewards") == place
    assert kept.place_of("text") == row(group, 0).places[0]
    assert not tracker.released
    tracker.scored(row(group, 1)._replace(attempt=7), Score(1.0, {}, place=place))
    assert tracker.released == [(group, 1, 7)], "nothing else would free what an old attempt stored"


def test_samples_of_a_row_that_cannot_be_scored_are_dropped_for_that_reason() -> None:
    tracker = Tracked()
    group = tracker.draw()
    tracker.generated([row(group, member) for member in range(4)])
    for member, bad_row in enumerate((True, True, False)):
        tracker.scored(row(group, member), Score(None, {}, "no number", bad_row=bad_row))
    events = [event for event in tracker.events if isinstance(event, Dropped)]
    dropped = [(member, event.reason) for event in events for member in event.members]
    assert dropped == [(0, "bad_row"), (1, "bad_row"), (2, "unscorable")]
    assert [tracker.gate.group(group).samples[member].reason for member in range(3)] == [
        reason for _, reason in dropped
    ]
