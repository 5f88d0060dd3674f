"""Words of strangers reach a terminal as text: by streams, lines, the live view and panels."""

import io
import sys

import pytest
from rich.table import Table
from rich.text import Text

from asyncrl.telemetry.clean_text import clean_streams, cleaned
from asyncrl.telemetry.display import CleanConsole, LineDisplay, LiveDisplay

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "screen": "\x1b[2J\x1b[31m",
    "one byte": "\x9b2J",
    "bell": "\x07",
    "back": "abc\x08\x08\x08xyz",
    "line again": "paid\rfree",
    "direction": "\u202eabc",
    "isolate": "\u2066abc\u2069",
    "clipboard": "\x1b]52;c;AAAA\x1b\\",
    "link": "\x1b]8;;http://x\x1b\\y",
    "unseen": "a\u200bb\ufeffc\U000e0041",
    "unseen letters": "a\u3164b\u115fc\uffa0d",
    "selectors": "a\U000e0100b\ufe00c",
    "arabic mark": "\u061cabc",
    "soft hyphen": "pass\xadword",
    "shift": "\x0e\x0f",
    "half": "\ud800",
}


def is_clean(text: str) -> bool:
    return cleaned(text) == text


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_commands_a_terminal(text: str) -> None:
    out = io.StringIO()
    live = io.StringIO()
    panel = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", out)
        with clean_streams():
            sys.stdout.write(f"{text}\n")
            sys.stderr.write(f"{text}\n")
            LineDisplay(sys.stdout, 3).say(text)
    LineDisplay(out, 3).say(text)
    LineDisplay(out, 3).progress(text)
    table = Table(text)
    table.add_row(text, Text(text, style="red"))
    CleanConsole(panel).print(table, text, markup=False, highlight=False)
    with LiveDisplay(CleanConsole(live), 3) as display:
        display.say(text)
        display.progress(text)
    assert [is_clean(each.getvalue()) for each in (out, live, panel)] == [True, True, True]
    assert ascii(text[:1])[1:-1] in out.getvalue() or "abc" in text or "a" in text or "paid" in text


def test_what_is_no_command_stays() -> None:
    for text in ("reward ± spread", "日本語\n\tπ", "👩\u200d🔬", "é" * 3, "line\n"):
        assert cleaned(text) == text
    assert cleaned("a\r\nb") == "a\nb"


def test_colours_of_asyncrl_are_written_where_a_terminal_reads() -> None:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        with clean_streams():
            CleanConsole(sys.stdout, force_terminal=True).print(Text("x\x1b[2J", style="red"))
    assert "\x1b[31mx" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
