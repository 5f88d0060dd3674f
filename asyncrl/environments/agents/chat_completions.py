"""Chat completions of OpenAI's HTTP API for agents: requests are read and checked, answers are written."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.user_code import suggestion
from asyncrl.config.written_values import written_or
from asyncrl.environments.observation import Message
from asyncrl.environments.tools.call_formats import Form
from asyncrl.environments.tools.parsed_calls import ToolCall
from asyncrl.environments.transcript import SampledAnswer

# Reads requests for chat completions: what the policy is asked, and what it cannot do, which is refused by name.


READ = (
    *("messages", "model", "tools", "tool_choice", "stream", "stream_options", "logprobs", "top_logprobs", "stop", "n"),
    *("response_format", "modalities"),
)
SET_BY_EXPERIMENT = (
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "seed", "reasoning_effort", "verbosity", "parallel_tool_calls", "prediction", "service_tier"),
    *("store", "metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
"""Parameters that are taken and have no effect: the experiment says how the policy samples."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MOST_MESSAGES = 10_000
MOST_TOOLS = 1_000


class RefusedRequest(Exception):
    """Reports a request that gets an error: what is wrong, the parameter, and the status of HTTP."""

    def __init__(self, text: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(text)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Holds what an agent asks. messages: as chat templates take them. digests: of the conversation up to and with each
    message, tools included. tools: schemas. calls: whether calls of tools are read in the answer. demanded: the
    function that the answer shall call, "" for any, None for none. usage: sent at the end of a stream. retry: the
    client says that it asks again."""

    model: str
    messages: tuple[Message, ...]
    digests: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()
    calls: bool = False
    demanded: str | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    retry: bool = False

    @property
    def digest(self) -> str:
        return self.digests[-1]


def read_request(body: bytes, *, retry: bool = False) -> ChatRequest:
    """Reads the body of a request. Raises RefusedRequest."""
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise RefusedRequest("the body is no JSON object")
    _refuse_what_is_not_done(found)
    tools = _tools(found.get("tools"))
    demanded = _demanded(found.get("tool_choice"), tools)
    messages = _messages(found.get("messages"))
    options = found.get("stream_options")
    return ChatRequest(
        model=str(found.get("model") or ""),
        messages=messages,
        digests=digests_of(messages, tools),
        tools=tools,
        calls=bool(tools) and found.get("tool_choice") != "none",
        demanded=demanded,
        stop=_stops(found.get("stop")),
        stream=bool(found.get("stream")),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(found.get("logprobs")),
        retry=retry,
    )


def digests_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns a digest for each beginning of a conversation. Two are equal where the policy would be shown the same."""
    state = hashlib.sha256(_text(tools))
    found = []
    for message in messages:
        state.update(b"\0" + _text(message))
        found.append(state.hexdigest())
    return tuple(found)


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _refuse_what_is_not_done(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if name not in READ and name not in SET_BY_EXPERIMENT:
            near = suggestion(name, [*READ, *SET_BY_EXPERIMENT])
            raise RefusedRequest(f"this endpoint knows no parameter {name}{near}", name)
        if name == "n" and value not in (None, 1):
            raise RefusedRequest("a request gets one answer: send n requests, which are branches of the episode", name)
        if name == "top_logprobs" and value:
            raise RefusedRequest("the log-probs of the sampled tokens are known, and no others: leave it out", name)
        kind = value.get("type") if isinstance(value, Mapping) else None
        if name == "response_format" and kind not in (None, "text"):
            raise RefusedRequest(f"the policy samples freely: answers of the form {kind!r} cannot be promised", name)
        if name == "modalities" and value not in (None, ["text"]):
            raise RefusedRequest("the policy writes text only", name)


def _demanded(given: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the function that an answer shall call, "" for any of them, and None where it need not call one. Raises
    RefusedRequest for a choice that no answer can meet."""
    if given in (None, "auto", "none"):
        return None
    named = given.get("function") if isinstance(given, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    known = [str(t["function"]["name"]) for t in tools]
    if given == "required" and known:
        return ""
    if given == "required":
        raise RefusedRequest("there are no tools, of which a call could be required", "tool_choice")
    if isinstance(name, str) and name not in known:
        raise RefusedRequest(f"tools has no function {name}{suggestion(name, known)}", "tool_choice")
    if isinstance(name, str):
        return name
    form = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
    raise RefusedRequest(f"the choice {given!r:.60} is not known; write {form}", "tool_choice")


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise RefusedRequest("messages is a list of at least one message", "messages")
    if len(given) > MOST_MESSAGES:
        raise RefusedRequest(f"there are {len(given)} messages; at most {MOST_MESSAGES} are read", "messages")
    found: list[Message] = []
    names: dict[str, str] = {}
    for place, message in enumerate(given):
        found.append(_message(message, f"messages[{place}]", names))
    return tuple(found)


def _message(given: Any, where: str, names: dict[str, str]) -> Message:
    """Returns a message as chat templates take it. names: of tools, by the calls so far, which the results name."""
    role = ROLES.get(str(given.get("role"))) if isinstance(given, Mapping) else None
    if role is None:
        roles = ", ".join(ROLES)
        raise RefusedRequest(f"{where} is no object with a role, one of {roles}", where)
    found: Message = {"role": role, "content": _content(given.get("content"), where)}
    if role == "assistant" and given.get("tool_calls"):
        found["tool_calls"] = [_call(call, where, names) for call in _listed(given["tool_calls"], where)]
    if role == "tool":
        found["tool_call_id"] = str(given.get("tool_call_id", ""))
        if name := names.get(found["tool_call_id"]):
            found["name"] = name
    elif isinstance(given.get("name"), str):
        found["name"] = given["name"]
    return found


def _content(given: Any, where: str) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    texts = []
    for part in _listed(given, where):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RefusedRequest(f"{where} has a part of the type {kind!r:.40}; the policy reads text only", where)
        texts.append(part["text"])
    return "".join(texts)


def _call(given: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RefusedRequest(f"{where} has a call without a function and its name", where)
    identity = str(given.get("id", ""))
    names[identity] = function["name"]
    arguments = _arguments(function.get("arguments"))
    return {"id": identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(given: Any) -> Any:
    """Returns arguments as an object, as chat templates write them; what is none stays text."""
    return written_or({} if given in (None, "") else given, lambda read: isinstance(read, dict))


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    listed = _listed(given or [], "tools")
    if len(listed) > MOST_TOOLS:
        raise RefusedRequest(f"there are {len(listed)} tools; at most {MOST_TOOLS} are read", "tools")
    for place, tool in enumerate(listed):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RefusedRequest(f"tools[{place}] is no function with a name", "tools")
    return tuple(dict(tool) for tool in listed)


def _stops(given: Any) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else _listed(given or [], "stop")
    if not all(isinstance(each, str) for each in listed):
        raise RefusedRequest("stop is a string or a list of strings", "stop")
    return tuple(filter(None, listed))


def _listed(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise RefusedRequest(f"{where} has {given!r:.40} where a list belongs", where.partition("[")[0])
    return given


# Writes chat completions: whole, or as a stream of chunks.


DONE = "data: [DONE]\n\n"
PIECE = 64
"""Characters of a chunk where the tokens are not known."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Holds an answer of the policy. turn: its number in the episode, from 1. content: without the calls, and cut
    before a stop string of the agent. cut: something was."""

    turn: int
    content: str
    calls: tuple[ToolCall, ...]
    sampled: SampledAnswer | None
    cut: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def message(self) -> Message:
        """Returns the message as `read_request` reads it when an agent sends it back."""
        calls = [self._call(number, dict(each.arguments)) for number, each in enumerate(self.calls)]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})

    @property
    def written_calls(self) -> list[dict[str, Any]]:
        """Returns the calls as responses have them: arguments are JSON."""
        return [self._call(number, json.dumps(dict(each.arguments))) for number, each in enumerate(self.calls)]

    def _call(self, number: int, arguments: Any) -> dict[str, Any]:
        function = {"name": self.calls[number].name, "arguments": arguments}
        return {"id": self.call_id(number), "type": "function", "function": function}

    def call_id(self, number: int) -> str:
        """Returns the id of a call: nine letters and digits, as strict templates want, the same when an episode is
        played again."""
        return f"call{self.turn % 1000:03d}{number % 100:02d}"

    @property
    def finish(self) -> str:
        if self.calls:
            return "tool_calls"
        return "length" if self.sampled is not None and self.sampled.finish == "length" and not self.cut else "stop"


def answer_of(
    request: ChatRequest, turn: int, text: str, sampled: SampledAnswer | None, form: Form, opened: bool = False
) -> ChatAnswer:
    """Reads the text that the policy said as the answer to a request. A call that cannot be read stays text. opened:
    whether the text begins inside thoughts."""
    found = form.parse(text, opened) if request.calls else None
    if found is not None and found.calls and not found.mistakes:
        return ChatAnswer(turn, found.content, found.calls, sampled)
    ends = [place for stop in request.stop if (place := text.find(stop)) >= 0]
    return ChatAnswer(turn, text[: min(ends)] if ends else text, (), sampled, cut=bool(ends))


def refusal(request: ChatRequest, answer: ChatAnswer) -> str | None:
    """Returns in what an answer does not do what `tool_choice` demands, which nothing makes a policy do; None where it
    does. The policy trains on what it sampled, whatever was demanded."""
    wanted = request.demanded
    called = ", ".join(call.name for call in answer.calls)
    if wanted is None or (called if wanted == "" else wanted in [call.name for call in answer.calls]):
        return None
    return f"the answer calls {called or 'no function'}, and tool_choice demands a call of {wanted or 'one'}"


def completion(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """Returns the body of a response that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": refusal(request, answer)}
    if answer.calls:
        message |= {"content": answer.content or None, "tool_calls": answer.written_calls}
    logprobs = _logprobs(answer) if request.logprobs else None
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": answer.finish}
    return {**_head(request, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def chunks(request: ChatRequest, answer: ChatAnswer) -> Iterator[str]:
    """Yields the events of a stream."""
    head = _head(request, answer, "chat.completion.chunk")

    def event(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return _event({**head, "choices": [choice]})

    yield event({"role": "assistant", "content": ""})
    pieces = _pieces(answer)
    known = _logprobs(answer) if request.logprobs else None
    if known is not None and len(pieces) != len(known["content"]):
        yield event({}, logprobs=known)  # Tokens that are no text of their own, or that calls are made of.
        known = None
    for number, piece in enumerate(pieces):
        yield event({"content": piece}, logprobs=known and {"content": [known["content"][number]], "refusal": None})
    for number, call in enumerate(answer.written_calls):
        yield event({"tool_calls": [{"index": number, **call}]})
    if said := refusal(request, answer):
        yield event({"refusal": said})
    yield event({}, answer.finish)
    if request.usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield DONE


def _pieces(answer: ChatAnswer) -> list[str]:
    """Returns the content in parts: a part for each token where it is made of them; the last may be its end."""
    tokens = [] if answer.sampled is None else list(answer.sampled.tokens)
    if tokens and not answer.calls:
        for parts in (tokens, [*tokens[:-1], ""]):
            if "".join(parts) == answer.content:
                return parts
    return [answer.content[place : place + PIECE] for place in range(0, len(answer.content), PIECE)]


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _head(request: ChatRequest, answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.turn}", "object": kind, "created": answer.created, "model": request.model}


def _logprobs(answer: ChatAnswer) -> dict[str, Any] | None:
    if (sampled := answer.sampled) is None:
        return None
    content = [
        {"token": token, "logprob": logprob, "bytes": list(own), "top_logprobs": []}
        for token, logprob, own in zip(sampled.tokens, sampled.logprobs, sampled.token_bytes, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    if answer.sampled is None:
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    prompt = answer.sampled.context
    own = len(answer.sampled.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": own, "total_tokens": prompt + own}
