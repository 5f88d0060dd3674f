"""The critic service on a tiny model: rows of values, updates that are taken once, checkpoints."""

import asyncio
import shutil
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.engines.training.critic_trainer import CriticStep
from asyncrl.errors import ConfigError, Refused
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.messages import CUT_SHORT
from asyncrl.services.critic import CriticService
from tests.unit.services.conftest import VOCABULARY, Serve, put_row, store_read_by
from tests.unit.services.counting import PatientCompute, saved

CAP = 24
INCARNATION = 1


def config(**sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "tiny"},
            "task": {"prompts": "none", "prompts_per_step": 2, "samples_per_prompt": 4},
            "generation": {"deterministic": True, "max_new_tokens": CAP, "slots": 8},
            "algorithm": {"preset": "ppo"},
            "critic": {"learning_rate": 1e-2},
            "staleness": {"limit": 9},
            **sections,
        }
    )


@pytest.fixture
def serving(serve: Serve, folder: Path) -> Serve:
    def critic(settings: Config | None = None, **changes: Any) -> Any:
        return serve(CriticService, "critic", settings or config(), **{"model_dir": folder, **changes})

    return critic


def sampled(service: CriticService, count: int = 6, first_group: int = 0) -> BatchRef:
    """Rows as generation leaves them."""
    draw = np.random.default_rng(first_group)
    store = store_read_by(service)
    rows = []
    for index in range(count):
        prompt = draw.integers(0, VOCABULARY, 3 + index)
        response = draw.integers(0, VOCABULARY, CAP - 3 * index)
        logprobs = draw.normal(-4, 0.3, len(response)).astype(np.float32)
        own = {"logprobs": logprobs, "versions": np.zeros(len(response), np.int32)}
        number = {"group": first_group + index // 4, "member": index % 4}
        rows.append(put_row(store, prompt_ids=prompt, response_ids=response, **number, **own)._replace(reward=1.0))
    return BatchRef(tuple(rows))


async def values_of(service: CriticService, refs: BatchRef) -> list[np.ndarray]:
    before = service.counters.get("tokens", 0)
    judged = await service.values(refs)
    assert service.counters["tokens"] - before == sum(ref.tokens for ref in refs)
    return [service.rows.read(ref.place_of("values"), ["values"])[0] for ref in judged]


def batch(service: CriticService, refs: BatchRef, values: list[np.ndarray], version: int = 0) -> Cuts:
    """What trains from `version`, with the values in one place with the rest, as this reader wants it."""
    store = store_read_by(service)
    rows = []
    for ref, judged in zip(refs, values, strict=True):
        names = ("prompt_ids", "response_ids", "logprobs", "versions")
        columns = dict(zip(names, store.read(ref.places[0], names), strict=True))
        place = store.put({**columns, "values": judged, "valued_at": np.zeros(1, np.int64)})
        rows.append(ref._replace(places=(place,), advantage=float(ref.member)))
    return Cuts(
        service.context.facts.incarnation, version, BatchRef(tuple(rows)), sum(r.tokens for r in rows), len(rows)
    )


def zeros(refs: BatchRef) -> list[np.ndarray]:
    return [np.zeros(ref.tokens, np.float32) for ref in refs]


async def test_every_sample_gets_one_more_place_with_a_value_a_token(serving: Serve) -> None:
    async with serving() as service:
        refs = sampled(service)
        judged = await service.values(refs)
        for ref, before in zip(judged, refs, strict=True):
            values, at = service.rows.read(ref.place_of("values"), ["values", "valued_at"])
            assert ref.places[0] == before.places[0]
            assert (values.dtype, values.shape, at.tolist()) == (np.float32, (ref.tokens,), [0])
        await service.release([ref.name for ref in judged], oldest=0)
        assert service.rows.used == 0


async def test_values_say_after_how_many_updates_they_were_made(serving: Serve) -> None:
    async with serving(config(training={"updates": 2})) as service:
        refs = sampled(service)
        report = await service.update(batch(service, refs, zeros(refs)))
        assert (report.version, report.updates, report.skipped) == (0, 2, "")
        assert report.metrics["critic/updates"] == 2
        judged = await service.values(refs)
        values, at = service.rows.read(judged.rows[0].place_of("values"), ["values", "valued_at"])
        assert at.tolist() == [2]
        assert np.abs(values).max() > 0


async def test_bits_of_a_row_depend_on_no_neighbour_when_deterministic(serving: Serve) -> None:
    async with serving() as service:
        refs = sampled(service)
        await service.update(batch(service, refs, zeros(refs)))
        together = await values_of(service, refs)
        for index in range(len(refs)):
            (alone,) = await values_of(service, refs.take([index]))
            assert together[index].tobytes() == alone.tobytes()


async def test_a_repeated_update_gets_the_stored_report_and_is_taken_once(serving: Serve) -> None:
    async with serving() as service:
        refs = sampled(service)
        cuts = batch(service, refs, zeros(refs))
        first, second = await asyncio.gather(service.update(cuts), service.update(cuts))
        assert first == second == await service.update(cuts)
        assert service._engine.optimizer.updates == 1


async def given_up(call: Coroutine[Any, Any, Any]) -> None:
    """Begin a call, and cancel it while it runs."""
    task = asyncio.ensure_future(call)
    for _ in range(4):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def test_an_update_whose_caller_gave_up_is_finished_before_a_checkpoint(serving: Serve, tmp_path: Path) -> None:
    async with serving(config(training={"updates": 6}), make_compute=PatientCompute) as service:
        refs = sampled(service)
        await given_up(service.update(batch(service, refs, zeros(refs))))
        assert service._engine.optimizer.updates < 6
        await saved(service, tmp_path, 0)
        assert service._engine.optimizer.updates == 6


async def test_an_update_whose_caller_gave_up_is_finished_before_the_next_one(serving: Serve) -> None:
    found = []
    for impatient in (True, False):
        async with serving(config(training={"updates": 6}), make_compute=PatientCompute) as service:
            refs = sampled(service)
            others = sampled(service, first_group=7)
            first = service.update(batch(service, refs, zeros(refs)))
            await (given_up(first) if impatient else first)
            await service.update(batch(service, others, zeros(others), version=1))
            assert service._engine.optimizer.updates == 12
            found.append([values.tobytes() for values in await values_of(service, refs)])
    assert found[0] == found[1]


async def test_a_sample_is_learnt_once_though_it_comes_again_in_another_batch_from_the_same_version(
    serving: Serve,
) -> None:
    """The policy's step was lost; what was not lost with it comes again beside other samples."""
    async with serving() as service:
        refs = sampled(service)
        others = sampled(service, first_group=7)
        await service.update(batch(service, refs, zeros(refs)))
        first = await service.update(batch(service, refs.take([0, 1]), zeros(refs.take([0, 1]))))
        assert (first.updates, first.skipped) == (0, "learnt before")
    async with serving() as service:
        refs = sampled(service)
        others = sampled(service, first_group=7)
        await service.update(batch(service, refs, zeros(refs)))
        mixed = BatchRef((*refs.rows[:3], *others.rows))
        found = await service.update(batch(service, mixed, zeros(mixed)))
        after = await values_of(service, refs)
    async with serving() as service:
        refs = sampled(service)
        others = sampled(service, first_group=7)
        await service.update(batch(service, refs, zeros(refs)))
        assert await service.update(batch(service, others, zeros(others))) == found
        for values, expected in zip(await values_of(service, refs), after, strict=True):
            assert values.tobytes() == expected.tobytes()


async def test_a_sample_is_learnt_once_though_a_later_version_has_it_again(serving: Serve, tmp_path: Path) -> None:
    """The policy's step was lost, another batch went first, and a partial cut left the sample for the version after."""

    async def again(service: CriticService, refs: BatchRef, version: int) -> tuple[int, str]:
        kept = BatchRef(tuple(row._replace(incarnation=service.context.facts.incarnation) for row in refs))
        report = await service.update(batch(service, kept, zeros(kept), version))
        return report.updates, report.skipped

    async with serving() as service:
        refs = sampled(service)
        others = sampled(service, first_group=7)
        await service.update(batch(service, refs, zeros(refs)))
        await service.update(batch(service, others, zeros(others), version=1))
        assert await again(service, refs, 2) == (0, "learnt before")
        await service.release([refs.rows[0].name], oldest=0)
        await saved(service, tmp_path, 2)
    async with serving(checkpoint_dir=tmp_path, incarnation=INCARNATION + 1) as resumed:
        refs = sampled(resumed)
        assert await again(resumed, refs.take(range(1, 6)), 3) == (0, "learnt before")
        new = BatchRef(tuple(row._replace(attempt=1) for row in refs.take([1])))
        assert await again(resumed, new, 4) == (1, "")
        await resumed.release([], oldest=9)
        assert not resumed._used


async def test_rows_that_are_gone_teach_nothing_and_the_next_batch_does(serving: Serve) -> None:
    async with serving() as service:
        refs = sampled(service)
        cuts = batch(service, refs, zeros(refs))
        store_read_by(service).free([cuts.batch.rows[2].places[0]])
        report = await service.update(cuts)
        assert (report.updates, report.skipped, report.metrics) == (0, "rows lost", {"critic/updates": 0.0})
        again = batch(service, refs.take([0, 1]), zeros(refs.take([0, 1])))
        assert (await service.update(again)).updates == 1


async def test_an_update_from_an_earlier_version_or_another_incarnation_is_refused(serving: Serve) -> None:
    async with serving() as service:
        refs = sampled(service)
        cuts = batch(service, refs, zeros(refs), version=3)
        await service.update(cuts)
        with pytest.raises(Refused, match=r"from version 2 of incarnation 1.* of version 3 of incarnation 1"):
            await service.update(replace(cuts, version=2))
        with pytest.raises(Refused, match="from version 3 of incarnation 0"):
            await service.update(replace(cuts, incarnation=0))


async def test_a_checkpoint_lies_beside_the_trainers_and_resumes(serving: Serve, tmp_path: Path) -> None:
    (tmp_path / "trainer.pt").write_bytes(b"the trainer's")
    async with serving() as service:
        refs = sampled(service)
        others = sampled(service, first_group=7)
        await service.update(batch(service, refs, zeros(refs), version=4))
        with pytest.raises(Refused, match=r"version 3 of incarnation 1.* version 4"):
            await saved(service, tmp_path, 3)
        made = await saved(service, tmp_path, 5)
        assert (made.version, made.chain) == (5, "")
        assert {"critic/trainer.pt", "critic/model/model.safetensors", "critic/model/config.json"} <= made.files.keys()
        assert all((tmp_path / name).is_file() and name.startswith("critic/") for name in made.files)
        await service.update(batch(service, others, zeros(others), version=5))
        expected = await values_of(service, refs)
    async with serving(checkpoint_dir=tmp_path, incarnation=INCARNATION + 1) as resumed:
        refs = sampled(resumed)
        others = sampled(resumed, first_group=7)
        with pytest.raises(Refused, match="from version 4"):
            await resumed.update(batch(resumed, others, zeros(others), version=4))
        cuts = batch(resumed, others, zeros(others), version=5)
        fresh = BatchRef(tuple(row._replace(incarnation=INCARNATION + 1) for row in cuts.batch))
        await resumed.update(replace(cuts, batch=fresh))
        for values, before in zip(await values_of(resumed, refs), expected, strict=True):
            assert values.tobytes() == before.tobytes()


async def test_it_begins_with_the_folder_it_is_given(serving: Serve, tmp_path: Path) -> None:
    async with serving() as service:
        refs = sampled(service)
        await service.update(batch(service, refs, zeros(refs)))
        await saved(service, tmp_path, 1)
        expected = await values_of(service, refs)
    async with serving(options={"model": str(tmp_path / "critic" / "model")}) as again:
        assert again._engine.optimizer.updates == 0
        for values, before in zip(await values_of(again, sampled(again)), expected, strict=True):
            assert values.tobytes() == before.tobytes()


async def test_a_folder_with_another_tokenizer_is_refused(serving: Serve, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    words = Tokenizer(models.WordLevel({f"v{i}": i for i in range(VOCABULARY)}, unk_token="v0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "other")
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=r"^critic\.model: its tokenizer is not that")):
        async with serving(options={"model": str(tmp_path / "other")}):
            pass


@pytest.mark.parametrize(("taken", "skipped"), [(0, CUT_SHORT), (1, "")])
async def test_a_critic_whose_run_ends_forgoes_the_updates_that_are_left_and_learns_nothing_twice(
    taken: int, skipped: str, serving: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(training={"updates": 2, "micro_batch_tokens": 64})
    advance = CriticStep.advance
    async with serving(settings) as service:

        def advance_and_end(step: CriticStep) -> bool:
            if step._trainer.updates == taken:
                with suppress(StopIteration):
                    service.undo_update().send(None)
            return advance(step)

        refs = sampled(service)
        with monkeypatch.context() as patch:
            patch.setattr(CriticStep, "advance", advance_and_end)
            report = await service.update(batch(service, refs, zeros(refs)))
        assert (report.updates, report.skipped) == (taken, skipped)
        assert service._engine.updates == taken
        later = await service.update(batch(service, sampled(service, first_group=8), zeros(refs), 1))
        assert (later.updates, later.skipped) == (0, CUT_SHORT)
        await saved(service, tmp_path, 1)
    async with serving(settings, checkpoint_dir=tmp_path) as resumed:
        refs = sampled(resumed)
        again = await resumed.update(batch(resumed, refs, zeros(refs), 1))
        assert (again.updates, again.skipped) == ((0, "learnt before") if taken else (2, ""))
