"""Checks chat messages and tools of a row, and brings them into the form that every chat template takes."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from asyncrl.config.written_values import written_or, written_value
from asyncrl.errors import TaskError
from asyncrl.tasks.pictures import checked_picture, is_picture

Message = dict[str, Any]
Messages = str | list[Message]
TOOLS = "tools"
"""Column of a row with the JSON schemas of functions that the model may call."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that chat templates know."""
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant"}
"""Names that other libraries give to roles."""
SENDERS = OTHER_ROLES | {"chatgpt": "assistant", "observation": "tool", "function_response": "tool"}
"""Names of ShareGPT's form, {"from", "value"}."""
MARK = "mark7f3a"  # stands in or before what a template is given, in a rendering that is only searched for it
FORM = '[{"role": "user", "content": "..."}]'
BEGIN = re.compile(r"""[\s\ufeff"\\]*(?:array\(|list\(|\()?\s*\[?\s*\{\s*\\*["'](\w+)\\*["']\s*:""")
"""Begin of a text that may hold messages: the first key of the first one."""
KEYS = tuple(re.compile(rf"""["'](?:{names})\\*["']\s*:""") for names in ("role|from", "content|value|tool_calls"))
MEANT = ("default", "const")
"""Keys of JSON schemas whose value may be null."""


def parsed(prompt: Any, where: str) -> Any:
    """Returns the messages that a text holds, as files without lists have them: as JSON, as Python shows them, or as
    pandas writes arrays. Another text stays as it is. Raises TaskError, which begins with `where`, for a text that
    begins like messages and holds none."""
    if not isinstance(prompt, str) or (begin := BEGIN.match(prompt)) is None:
        return prompt
    try:
        found = written_value(prompt.lstrip("\ufeff"))
    except ValueError as error:
        is_cut = begin[1] in ("role", "content") and "]" not in prompt
        if is_cut or all(key.search(prompt) for key in KEYS):
            raise TaskError(
                f"{where}: this text begins like messages, which it does not hold ({error}), and a model would read it "
                f"as it is: write messages as JSON, {FORM}; if it is a text, as the content of one: {prompt:.80}"
            ) from None
        return prompt
    listed = found if isinstance(found, list) else [found]
    return found if listed and all(map(_is_message, listed)) else prompt


def _is_message(each: Any) -> bool:
    if not isinstance(each, dict):
        return False
    return ("role" in each and ("content" in each or "tool_calls" in each)) or ("from" in each and "value" in each)


def in_one_form(prompt: Any, where: str) -> Any:
    """Returns messages as every chat template takes them: {"role", "content"}, calls with arguments that are objects,
    and no null, which tables hold where rows share columns. Raises TaskError, which begins with `where`, for calls that
    are none."""
    if not isinstance(prompt, list):
        return prompt
    found = [
        _message(each, f"{where}: message {number}") if isinstance(each, dict) else each
        for number, each in enumerate(prompt, 1)
    ]
    for number, each in enumerate(found):
        if _is_table(each) and (ids := [call.get("id") for call in each.get("tool_calls", ())]) and None not in ids:
            _sort_results(found, number + 1, ids, where)
    return found


def _sort_results(messages: list[Any], begin: int, ids: Sequence[Any], where: str) -> None:
    """Brings results, from this index on, into the order of the calls; a TaskError for a result of none of them."""
    results = list(takewhile(lambda each: _is_table(each) and each.get("role") == "tool", messages[begin:]))
    for number, each in enumerate(results, begin + 1):
        if (call := each.get("tool_call_id")) is not None and call not in ids:
            raise TaskError(
                f"{where}: message {number} is the result of the call {call!r:.80}, and the calls before it have the "
                f"ids {ids!r:.200}: write the id of one of them as its tool_call_id"
            )
    if all(each.get("tool_call_id") is not None for each in results):
        messages[begin : begin + len(results)] = sorted(results, key=lambda each: ids.index(each["tool_call_id"]))


def without_null(value: Any, kept: Sequence[str] = ()) -> Any:
    """Returns a value whose tables have no key with null. kept: keys that may have it."""
    if isinstance(value, list):
        return [without_null(each, kept) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: without_null(each, kept) for key, each in value.items() if each is not None or key in kept}


def _message(given: Message, where: str) -> Message:
    found: Message = without_null(given)
    if given.get("content", "") is None:  # It is looked at with the calls.
        found["content"] = None
    if "role" not in found and isinstance(sender := found.get("from"), str) and "value" in found:
        role = SENDERS.get(sender.strip().lower(), sender.strip().lower())
        if role not in ROLES:
            raise TaskError(f'{where} is from "{sender}", and roles are {", ".join(ROLES)}: rename it')
        found = {"role": role, "content": found.pop("value"), **found}
        del found["from"]
    if "function_call" in found:  # The name that OpenAI's API had before `tool_calls`.
        found.setdefault("tool_calls", [found.pop("function_call")])
    calls = written_or(found.pop("tool_calls", None), lambda read: isinstance(read, list))
    if calls:
        listed = calls if isinstance(calls, list) else [calls]
        found["tool_calls"] = [_call(each, where) for each in listed]
    return found


def _call(given: Any, where: str) -> dict[str, Any]:
    """Returns a call of a function as templates take it: its arguments are an object, which APIs write as JSON text."""
    call = written_or(given, _is_table)
    call = call if _is_table(call) else {}
    function = written_or(call.get("function", call), _is_table)
    function = function if _is_table(function) else {}
    if not isinstance(function.get("name"), str):
        form = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        raise TaskError(f"{where}: a call in its tool_calls is {given!r:.80}: write {form}")
    arguments = function.get("arguments")
    arguments = {} if arguments is None or arguments == "" else written_or(arguments, _is_table)
    if not _is_table(arguments):
        raise TaskError(
            f"{where}: the arguments of its call of {function['name']} are {arguments!r:.80}, and templates take an "
            'object: write {"NAME": VALUE}, or the JSON text of it'
        )
    around = {name: value for name, value in call.items() if name not in ("name", "arguments")}
    own = {"name": function["name"]} if function is call else function
    return {"type": "function", **around, "function": {**own, "arguments": arguments}}


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def without_answer(prompt: Any, where: str) -> tuple[Any, str]:
    """Returns what a conversation has before its last answer, and the text of that answer; "" where it ends otherwise.
    Raises TaskError, which begins with `where`, when it has nothing before."""
    if not isinstance(prompt, list) or not prompt or not _is_table(prompt[-1]) or prompt[-1].get("role") != "assistant":
        return prompt, ""
    if len(prompt) == 1:
        raise TaskError(f"{where}: the conversation has nothing before its last answer, so there is nothing to ask")
    content = prompt[-1].get("content")
    return prompt[:-1], content if isinstance(content, str) else ""


def no_prompt(prompt: Any) -> str:
    """Returns why this is neither a text nor messages; "" where it is. A text must not be blank, nor must all messages
    be."""
    if isinstance(prompt, str):
        return "" if _is_visible(prompt) else f"this is {prompt!r:.200}"
    if not isinstance(prompt, list) or not prompt:
        return f"this is {prompt!r:.200}"
    wrong = next(filter(None, (_no_message(each, number) for number, each in enumerate(prompt, 1))), "")
    contents = [] if wrong else [each.get("content") for each in prompt]
    if wrong or any(_is_visible(content) if isinstance(content, str) else content for content in contents):
        return wrong
    return f"this is {prompt!r:.200}"


def _is_visible(text: str) -> bool:
    """Returns whether a text has a character that shows: no space, control or formatting character."""
    return any(character.isprintable() and not character.isspace() for character in text)


def _no_message(message: Any, number: int) -> str:
    """Returns why this is no message; "" where it is."""
    if not isinstance(message, dict):
        return f"message {number} is {message!r:.80}"
    if not isinstance(role := message.get("role"), str) or not role.strip():
        return f"the role of message {number} is {role!r:.80}"
    known = OTHER_ROLES.get(role.strip().lower(), role.strip().lower())
    if role != known and known in ROLES:
        return f'the role of message {number} is "{role}", which templates call "{known}"'
    is_whole = "content" in message or message.get("tool_calls")
    return "" if is_whole else f'message {number} ({role}) has no "content"'


def ends_with_answer(prompt: Messages) -> bool:
    """Returns whether the last message of a prompt is the beginning of an answer."""
    return not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"


def as_messages(text: str, system: str = "") -> list[Message]:
    """Returns a text as the message of a user, after a system message if there is one."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def plain_messages(messages: list[Message], where: str, folder: Path = Path()) -> list[Message]:
    """Returns messages whose contents are texts; parts that are texts are joined, unless there is a picture among them.
    folder: where paths of pictures begin. Raises TaskError, which begins with `where`, for other contents, which
    templates would write as Python shows them."""
    return [_with_text(message, f"{where}: message {number}", folder) for number, message in enumerate(messages, 1)]


def _with_text(message: Message, where: str, folder: Path) -> Message:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return {**message, "content": content}
    where = f"{where} ({message['role']})"
    if not isinstance(content, list):
        raise TaskError(f"{where}: its content is {content!r:.80}, and a model reads text: write a text")
    if not any(map(is_picture, content)):
        return {**message, "content": "".join(_text_of(part, where) for part in content)}
    parts = [
        checked_picture(part, folder, where) if is_picture(part) else {"type": "text", "text": _text_of(part, where)}
        for part in content
    ]
    return {**message, "content": parts}


def _text_of(part: Any, where: str) -> str:
    """Returns the text of a part, which is one or has one: {"type": "text", "text": ...}."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise TaskError(f"{where}: a part of its content is {kind}: {part!r:.80}; asyncrl reads texts and images")


def tools_of(columns: Mapping[str, Any], is_text: bool, where: str) -> list[dict[str, Any]]:
    """Returns the tools of a row, which are a list or a JSON text of one. is_text: the prompt is no chat. Raises
    TaskError, which begins with `where`, for others."""
    given = columns.get(TOOLS)
    found = written_or(given, lambda read: not isinstance(read, str))  # Another text is refused below.
    if not found:
        return []
    advice = f'; write task.columns = {{ {TOOLS} = "" }} if they are something else'
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise TaskError(
            f"{where}: the column {TOOLS} is no list of JSON schemas of functions, which the chat template would show: "
            f"{found!r:.80}{advice}"
        )
    if is_text:
        raise TaskError(
            f"{where}: the row has {TOOLS}, which only a chat template shows, and its prompt is a text: write "
            f'task.text_prompts = "chat", or messages{advice}'
        )
    tools = without_null(found, MEANT if isinstance(given, str) else ())
    return [{"type": "function", "function": each} if _is_bare(each) else each for each in tools]


def _is_bare(tool: Mapping[str, Any]) -> bool:
    """Returns whether a schema lacks the table {"type": "function", "function": ...} around it."""
    return "name" in tool and "parameters" in tool and "function" not in tool


def takes_parts(render: Callable[[Message], str]) -> bool:
    """Returns whether a template shows contents only as lists of parts, as those of models for pictures do."""
    shown = []
    for each in (asked := {"role": "user", "content": "asked7f3a"}, in_parts(asked)):
        try:
            text = render(each)
            shown.append(asked["content"] in text and not re.search(r"""["']text["']""", text))  # no list as text
        except TaskError:
            shown.append(False)
    return shown == [False, True]


def in_parts(message: Message) -> Message:
    """Returns a message whose content is a list of parts."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def refuse_unseen_functions(messages: Sequence[Message], tools: Sequence[Any], render: Callable[..., str]) -> None:
    """Refuses a template that drops one of the functions which a model may call, or one of the calls: marks stand
    before their names, which may stand elsewhere too. render: renders messages and tools."""
    marks: dict[str, tuple[str, str]] = {}

    def marked(each: Any, kind: str) -> Any:
        described = each.get("function", each) if isinstance(each, Mapping) else {}
        if not isinstance(described, Mapping) or not isinstance(name := described.get("name"), str):
            return each
        mark = f"{MARK}{len(marks)}z{name}"
        marks[mark] = kind, name
        own = {**described, "name": mark}
        return {**each, "function": own} if "function" in each else own

    offered = [marked(tool, "tools") for tool in tools]
    said = [*messages]
    for number, each in enumerate(said):
        if calls := each.get("tool_calls"):
            said[number] = {**each, "tool_calls": [marked(call, "tool_calls") for call in calls]}
    text = render(said, offered) if marks else ""
    for mark, (kind, name) in marks.items():
        if mark not in text:
            raise TaskError(
                f"the model's chat template leaves out {kind}, {name} among them: take a model whose template shows "
                f"them, or rows without {kind}"
            )
