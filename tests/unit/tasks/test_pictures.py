"""Pictures in the messages of prompts."""

import base64
import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks import Prompts, load_prompts
from asyncrl.tasks.pictures import has_pictures, picture_files, text_of_content, with_pictures_read
from asyncrl.tasks.prompt_lengths import write_longest

PNG = b"\x89PNG\r\n\x1a\n" + b"the rest of a file"
URI = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def asked(picture: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": picture}, "Which ", {"text": "colour?"}]}]


def written(folder: Path, picture: Any = "red.png") -> Path:
    (folder / "red.png").write_bytes(PNG)
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": asked(picture), "answer": "red"}) + "\n")
    return path


def test_a_path_begins_in_the_folder_of_the_rows_and_is_read_for_the_worker(tmp_path: Path) -> None:
    prompt, columns = load_prompts(str(written(tmp_path))).row(0)
    assert prompt[0]["content"][0] == {"type": "image", "image": str(tmp_path / "red.png")}
    assert prompt[0]["content"][1:] == [{"type": "text", "text": "Which "}, {"type": "text", "text": "colour?"}]
    assert columns["prompt"] == prompt
    sent = with_pictures_read(prompt)
    assert sent[0]["content"][0]["image"] == URI
    assert picture_files(sent) == [PNG]
    assert text_of_content(sent[0]["content"]) == "<image>Which colour?"


@pytest.mark.parametrize("picture", [PNG, URI, {"bytes": PNG, "path": "gone.png"}])
def test_bytes_and_data_uris_become_a_row_that_can_be_sent_as_text(picture: Any) -> None:
    prompt, columns = Prompts([{"prompt": asked(picture)}], "p", system="Look.").row(0)
    assert prompt[0] == {"role": "system", "content": "Look."}
    assert with_pictures_read(prompt) is not None
    assert picture_files(prompt) == [PNG]
    assert json.loads(json.dumps(columns)) == {"prompt": prompt[1:]}
    assert msgpack.unpackb(columns.packed.data.tobytes()) == dict(columns)


def test_a_parquet_file_has_pictures_as_bytes(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "image": {"bytes": PNG, "path": None}}]}]}
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert picture_files(load_prompts(str(tmp_path / "rows.parquet")).row(0).prompt) == [PNG]


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        ("blue.png", "the picture .*blue.png cannot be read: No such file"),
        ("rows.jsonl", "rows.jsonl is no picture"),
        ("https://example.org/red.png", "a picture is a path, bytes or a data URI"),
        ("data:image/png;base64,iVBO=R", "cannot be decoded"),
        ("data:text/plain,red", "a picture is written as data:image/png"),
        ("data:image/png;base64,aGVsbG8=", "a data URI is no picture"),
        (7, "a picture is a path, bytes or a data URI"),
    ],
)
def test_what_is_no_picture_is_refused_with_its_row(tmp_path: Path, picture: Any, said: str) -> None:
    with pytest.raises(TaskError, match=rf"rows.jsonl, line 1: message 1 \(user\): ?.*{said}"):
        load_prompts(str(written(tmp_path, picture))).row(0)


def test_a_file_that_went_away_is_named_when_it_is_sent(tmp_path: Path) -> None:
    prompt = load_prompts(str(written(tmp_path))).row(0).prompt
    (tmp_path / "red.png").unlink()
    with pytest.raises(TaskError, match=r"the picture .*red.png cannot be read"):
        with_pictures_read(prompt)


def test_the_prompts_that_a_worker_counts_have_their_pictures(tmp_path: Path) -> None:
    write_longest(tmp_path / "longest.jsonl", {"task.prompts": load_prompts(str(written(tmp_path)))})
    (line,) = map(json.loads, (tmp_path / "longest.jsonl").read_text().splitlines())
    assert picture_files(line["prompt"]) == [PNG]


def test_prompts_without_pictures_stay_as_they_are() -> None:
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        assert not has_pictures(prompt)
        assert with_pictures_read(prompt) is prompt
        assert picture_files(prompt) == []
