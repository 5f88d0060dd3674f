"""Pictures in the messages of a prompt: parts {"type": "image", "image": PICTURE} of their content.

A picture is a path, the bytes of a file, or a data URI of them. Rows keep a path, and the file is read when the prompt
goes to a worker, which may run on another host; there the picture is a data URI, so that a prompt stays plain text.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import TaskError

IMAGE = "image"
"""Type of a part that is a picture, and its key."""
MARK = "<image>"
"""Stands for a picture where a prompt is shown as text."""
BEGINNINGS = {
    "png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "jpeg": re.compile(rb"\xff\xd8\xff"),
    "gif": re.compile(rb"GIF8[79]a"),
    "webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "bmp": re.compile(rb"BM"),
}
"""Kinds of files with a picture, by how they begin."""
LONGEST_BEGINNING = 16
DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")


def is_picture(part: Any) -> bool:
    """Returns whether a part of a content is a picture."""
    return isinstance(part, Mapping) and part.get("type") == IMAGE


def checked_picture(part: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    """Returns a part with the path or the data URI of its picture. folder: where relative paths begin. Raises
    TaskError, which begins with `where`, when there is no such file or it is no picture."""
    value = part.get(IMAGE)
    if isinstance(value, Mapping):  # Data sets of the hub have bytes, or a path, or both.
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return {"type": IMAGE, IMAGE: _data_uri(value, f"{where}: a picture of {len(value)} bytes")}
    if isinstance(value, str) and value.startswith("data:"):
        _kind_of(_decoded(value, where), f"{where}: a data URI")
        return {"type": IMAGE, IMAGE: value}
    if not isinstance(value, str) or not value or "://" in value:
        raise TaskError(
            f"{where}: a picture is a path, bytes or a data URI (data:image/png;base64,...), this is {value!r:.80}; "
            "download pictures from addresses before the run"
        )
    path = (folder / Path(value).expanduser()).absolute()
    _kind_of(_read(path, where, LONGEST_BEGINNING), f"{where}: {path}")
    return {"type": IMAGE, IMAGE: str(path)}


def with_pictures_read(prompt: Any) -> Any:
    """Returns a prompt whose pictures are data URIs. Raises TaskError for a file that cannot be read."""
    if isinstance(prompt, str) or not has_pictures(prompt):
        return prompt
    return [_message_read(message) for message in prompt]


def has_pictures(prompt: Any) -> bool:
    """Returns whether a prompt has a picture."""
    return not isinstance(prompt, str) and next(_pictures(prompt), None) is not None


def picture_files(prompt: Any) -> list[bytes]:
    """Returns the files of the pictures of a prompt whose pictures are read, in their order."""
    return [] if isinstance(prompt, str) else [_decoded(part[IMAGE], "the prompt") for part in _pictures(prompt)]


def text_of_content(content: Any) -> str:
    """Returns the text of a content, with a mark for each picture."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(MARK if is_picture(part) else str(part.get("text", "")) for part in content)


def _pictures(prompt: Any) -> Iterator[Mapping[str, Any]]:
    for message in prompt:
        content = message.get("content")
        yield from filter(is_picture, content if isinstance(content, list) else ())


def _message_read(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        content = [_part_read(part) if is_picture(part) else part for part in content]
    return {**message, "content": content}


def _part_read(part: Mapping[str, Any]) -> dict[str, Any]:
    value = part[IMAGE]
    if value.startswith("data:"):
        return dict(part)
    return {"type": IMAGE, IMAGE: _data_uri(_read(Path(value), "a prompt"), value)}


def _data_uri(data: bytes, where: str) -> str:
    return f"data:image/{_kind_of(data, where)};base64,{base64.b64encode(data).decode()}"


def _kind_of(data: bytes, where: str) -> str:
    for kind, beginning in BEGINNINGS.items():
        if beginning.match(data):
            return kind
    raise TaskError(f"{where} is no picture: a PNG, JPEG, GIF, WebP or BMP file begins otherwise than {data[:8]!r}")


def _decoded(uri: str, where: str) -> bytes:
    if not (beginning := DATA_URI.match(uri)):
        raise TaskError(f"{where}: a picture is written as data:image/png;base64,..., this is {uri:.40}")
    try:
        return base64.b64decode(uri[beginning.end() :], validate=True)
    except binascii.Error as error:
        raise TaskError(f"{where}: the base64 of a picture cannot be decoded: {error}") from None


def _read(path: Path, where: str, most: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise TaskError(f"{where}: the picture {path} cannot be read: {error.strerror or error}") from error
