"""Says who reads what a model wrote, and where: the table of SECURITY.md. `IN_SANDBOX` may evaluate it."""

from asyncrl.rewards.templates import CHILD, IN_SANDBOX, READERS

CONTAINED = "contained child"
OF_ENVIRONMENTS = {
    "calculator": ("asyncrl's parsers of calls, on `re` and `json`; its arithmetic is its own", CHILD),
    "dialogue": ("Python's string methods", CHILD),
    "guess": ("Python's string methods", CHILD),
    "repair": ("Python, which runs it", IN_SANDBOX),
    "tools": ("asyncrl's parsers of calls, on `re` and `json`; the tools of the user", CONTAINED),
    "agent": ("the program of the user", CONTAINED),
    "gymnasium": ("the environment's package", CONTAINED),
    "mcp": ("asyncrl's parsers of calls; the MCP server", CONTAINED),
    "openenv": ("`json`, to send it; the server", CONTAINED),
    "textarena": ("the environment's package", CONTAINED),
    "verifiers": ("the environment's package", CONTAINED),
}
ELSEWHERE = {
    "functions and environments of the user": ("what they call, with their rights", CONTAINED),
    "chat templates": ("nobody: jinja2 puts it into a text, in its sandbox", "generators"),
    "tokenizers": (
        "tokenizers and sentencepiece, as text without special tokens where an environment says it",
        "generators",
    ),
    "reports, dashboard, feedback page": ("nobody: it is escaped, and shown as text", "command; browser"),
}


def table() -> str:
    """Returns the table as Markdown."""
    rows = {
        **{f"reward `{name}`": READERS[name] for name in sorted(READERS)},
        **{f"environment `{name}`": row for name, row in OF_ENVIRONMENTS.items()},
        **ELSEWHERE,
    }
    lines = [f"| {name} | {package} | {where} |" for name, (package, where) in rows.items()]
    return "\n".join(["| text goes to | parsed by | where |", "|---|---|---|", *lines])
