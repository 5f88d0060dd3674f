"""Pixels of a group are stored once and travel once, whichever of its samples are trained or compared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.models.prompt_pictures import PIXELS, read_pictures
from asyncrl.engines.models.warmed_up_model import build_picture_model, build_picture_tokenizer, save
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.services.generation import GenerationService
from asyncrl.services.reference import ReferenceService
from asyncrl.tasks.builtin import colours
from tests.unit.services.conftest import Serve

SAMPLES = 4
PIXELS_BYTES = 16 * 96 * 4
"""Bytes of the pixels of a picture of 16 x 16: 16 patches of 4 x 4 x 3 x 2 numbers."""


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("eyes")
    tokenizer = build_picture_tokenizer(colours.DEMONSTRATIONS.words)
    save(build_picture_model(tokenizer), tokenizer, folder)
    return folder


def config() -> Config:
    task = {"prompts": "none", "prompts_per_step": 2, "samples_per_prompt": SAMPLES, "max_prompt_tokens": 32}
    generation = {"slots": 6, "max_new_tokens": 4}
    return Config.model_validate(
        {"model": {"name": "tiny"}, "task": task, "generation": generation, "algorithm": {"kl": 0.1}}
    )


def group(number: int, members: int = SAMPLES, attempt: int = 0) -> PromptGroup:
    prompt: Any = colours.training(9)[number]["prompt"]
    asked = [{**prompt[0], "content": [uri(part) for part in prompt[0]["content"]]}]
    return PromptGroup(number, attempt, 1, asked, tuple(range(members)), number, -1, 1.0, 4, 60.0)


def uri(part: dict[str, Any]) -> dict[str, Any]:
    from asyncrl.tasks.pictures import checked_picture, is_picture

    return checked_picture(part, Path(), "a test") if is_picture(part) else part


class CountedReader:
    """Reads rows of one service, and counts the bytes of pixels and the rows that have them."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.rows = self.bytes = 0

    async def read(self, refs: BatchRef, columns: Any) -> Batch:
        from asyncrl.protocols.batch import Column

        cells = [self._rows.read(ref.place_of(columns[0]), columns) for ref in refs]
        if PIXELS in columns:
            self.rows += len(cells)
            self.bytes += sum(cell[list(columns).index(PIXELS)].nbytes for cell in cells)
        return Batch({name: Column.of([cell[i] for cell in cells]) for i, name in enumerate(columns)})


def sampling(folder: Path) -> dict[str, Any]:
    return {"model_dir": folder, "options": {"own_version": 0}, "make_compute": ThreadCompute}


async def test_pixels_are_stored_and_read_once_a_group(eyes: Path, serve: Serve) -> None:
    async with serve(GenerationService, "generation", config(), **sampling(eyes)) as service:
        found = [row for number in (3, 4) async for part in service.generate(group(number)) for row in part]
        rows = service.rows
        assert rows is not None
        refs = BatchRef(tuple(sorted(found, key=lambda row: row.name)))
        assert len(refs) == 2 * SAMPLES
        assert len({row.place_of(PIXELS) for row in refs}) == 2
        assert rows.used == 2 * SAMPLES + 2
        reader: Any = CountedReader(rows)
        pictures = await read_pictures(reader, refs)
        assert (reader.rows, reader.bytes) == (2, 2 * PIXELS_BYTES)
        assert all(each is pictures[number // SAMPLES * SAMPLES] for number, each in enumerate(pictures))
        assert pictures[0] is not None
        assert pictures[0].positions.shape == (3, refs.rows[0].prompt_tokens)

        async with serve(ReferenceService, "reference", config(), model_dir=eyes, reader=reader) as reference:
            places = await reference.logprobs(refs)
            name = "reference_logprobs"
            logprobs = [reference.rows.read(row.place_of(name), [name])[0] for row in places]
        assert (reader.rows, reader.bytes) == (4, 4 * PIXELS_BYTES)
        for row, own in zip(refs, logprobs, strict=True):
            (recorded,) = rows.read(row.place_of("logprobs"), ["logprobs"])
            assert np.abs(own - recorded).max() < 1e-4

        again = [row async for part in service.generate(group(3, 2, attempt=1)) for row in part]
        assert {row.place_of(PIXELS) for row in again} == {refs.rows[0].place_of(PIXELS)}
        await service.release([(3, member, 0) for member in range(SAMPLES)], 0)
        assert rows.used == 2 + 1 + SAMPLES + 1
        await service.release([(3, member, 1) for member in range(2)], 0)
        assert rows.used == SAMPLES + 1
        await service.release([], oldest=5)
        assert rows.used == 0


async def test_an_evaluation_stores_no_pixels(eyes: Path, serve: Serve) -> None:
    async with serve(GenerationService, "evaluation", config(), **sampling(eyes)) as service:
        found = [row async for part in service.generate(group(3)) for row in part]
        assert [len(row.places) for row in found] == [1] * SAMPLES
