"""The web page and the HTTP endpoint of live feedback.

GET  /           the page; the key is in its address, ?key=...
GET  /answers    what waits: {"ask", "scale", "waiting", "answers": [...], "pairs": [[..., ...], ...]}
POST /ratings    {"sample": NAME, "rating": 1 to scale}, {"chosen": NAME, "other": NAME}, {"equal": [NAME, NAME]}
                 or {"skipped": [NAME, ...]}, for which the run waits no longer
"""

import json
import secrets
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from asyncrl.config.sections.runtime_config import FeedbackConfig
from asyncrl.rewards.feedback.pairs import Judgement, RatableAnswer
from asyncrl.rewards.feedback.waiting_answers import FeedbackBoard, RatedBefore, UnknownAnswer

PAGE = Path(__file__).with_name("page.html")
BODY_BYTES = 4096
"""Largest body of a rating: two names of answers are 100 bytes."""
SHOWN = 50
"""Answers, or pairs, of one response: far more than a person reads before the page asks again."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # The address has the key.
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
Endpoint = Callable[[Request], Awaitable[Response]]
FORMS = (
    '{"sample": NAME, "rating": NUMBER}, {"chosen": NAME, "other": NAME}, {"equal": [NAME, NAME]} or '
    '{"skipped": [NAME, ...]}'
)


class FeedbackWeb:
    """Serves the page. key: everyone who has it may read answers and rate them."""

    def __init__(self, board: FeedbackBoard, config: FeedbackConfig, key: str) -> None:
        self._board = board
        self._config = config
        self._key = key.encode()
        self._page = PAGE.read_text(encoding="utf-8")
        routes = [
            Route("/", self._guarded(self._show_page)),
            Route("/answers", self._guarded(self._list_answers)),
            Route("/ratings", self._guarded(self._take_rating), methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _failed})

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            given = token if scheme.lower() == "bearer" else request.query_params.get("key", "")
            if not secrets.compare_digest(given.encode(), self._key):
                raise HTTPException(401, "the key is missing or wrong; open the address that the command printed")
            return await endpoint(request)

        return guarded

    async def _show_page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return HTMLResponse(
            self._page.replace("{{nonce}}", nonce), headers={**HEADERS, "Content-Security-Policy": policy}
        )

    async def _list_answers(self, request: Request) -> Response:
        board = self._board
        asked = {
            "ask": self._config.ask,
            "scale": self._config.scale,
            "waiting": board.waiting,
            "ratings": board.file.ratings,
            "answers": [_shown(answer) for answer in islice(board.unanswered(), SHOWN)],
            "pairs": [[_shown(answer) for answer in pair] for pair in islice(board.pairs(), SHOWN)],
        }
        return JSONResponse(asked, headers=HEADERS)

    async def _take_rating(self, request: Request) -> Response:
        said = await _body(request)
        try:
            judgement = await self._decide(said)
        except UnknownAnswer as error:
            raise HTTPException(404, str(error)) from None
        except RatedBefore as error:
            raise HTTPException(409, str(error)) from None
        except OSError as error:
            raise HTTPException(507, f"the rating is not kept, it could not be written: {error}") from None
        return JSONResponse({"values": list(judgement.values), "late": judgement.late}, headers=HEADERS)

    async def _decide(self, said: dict[str, Any]) -> Judgement:
        scale = self._config.scale
        match said:
            case {"sample": str(name), "rating": int(rating), **rest} if not rest and not isinstance(rating, bool):
                if not 1 <= rating <= scale:
                    raise HTTPException(400, f"a rating is a whole number from 1 to {scale}, not {rating}")
                return await self._board.rate(name, (rating - 1) / (scale - 1))
            case {"chosen": str(chosen), "other": str(other), **rest} if not rest:
                return await self._board.pick(chosen, other)
            case {"equal": [str(first), str(second)], **rest} if not rest:
                return await self._board.pick(first, second, equal=True)
            case {"skipped": [*names], **rest} if names and not rest and all(isinstance(name, str) for name in names):
                await self._board.skip(names)
                return Judgement((), (), late=False)
        raise HTTPException(400, f"this is no rating: {json.dumps(said)[:200]}; write {FORMS}")


async def _body(request: Request) -> dict[str, Any]:
    """Reads a JSON object; a body over the limit is refused before it is parsed."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_BYTES:
            raise HTTPException(413, f"a rating has at most {BODY_BYTES} bytes")
    try:
        said = json.loads(data)
        json.dumps(said, ensure_ascii=False).encode()  # Half a character is in no text, and in no answer.
    except (ValueError, RecursionError):
        raise HTTPException(400, f"the body is no JSON; write {FORMS}") from None
    if not isinstance(said, dict):
        raise HTTPException(400, f"the body is no JSON object; write {FORMS}")
    return said


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, {**HEADERS, **(error.headers or {})})


def _shown(answer: RatableAnswer) -> dict[str, Any]:
    """Returns what the page shows of an answer: its conversation as messages, the last one the policy's."""
    prompt = answer.prompt
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = answer.turns or [{"role": "assistant", "content": answer.text}]
    messages = [{"role": str(each.get("role")), "content": _text(each.get("content"))} for each in before]
    said = [{"role": str(each.get("role")), "content": _text(each.get("content"))} for each in said]
    return {"sample": answer.id, "group": answer.group, "prompt": messages, "said": said, "text": answer.text}


def _text(content: Any) -> str:
    if isinstance(content, list):  # A picture's data URI is no text to read.
        content = [{"type": "image"} if part.get("type") == "image" else part for part in content]
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
