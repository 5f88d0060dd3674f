"""Says who reads what a model wrote, and where: the table of SECURITY.md. `IN_SANDBOX` may evaluate it."""

IN_SANDBOX = "sandbox for programs"
CHILD = "child of asyncrl's own code"
CONTAINED = "contained child"

OF_TEMPLATES = {
    "exact_match": ("Python's string methods", CHILD),
    "regex_format": ("Python's `re`, with the pattern of the config", CHILD),
    "numeric": ("asyncrl's number parser, on `re`", CHILD),
    "length": ("Python's string methods", CHILD),
    "repetition": ("Python's string methods", CHILD),
    "environment": ("nobody: it sums numbers", CHILD),
    "judge": ("`json`, to send it; the judge's own answer is read as JSON and by `re`", CHILD),
    "math_verify": ("math-verify, latex2sympy2_extended, antlr4, sympy (evaluate)", IN_SANDBOX),
    "reasoning_gym": ("reasoning-gym, sympy (evaluate)", IN_SANDBOX),
    "compiles": ("Python's compiler", IN_SANDBOX),
    "lint": ("Python's compiler, `ast`, `symtable`, `tokenize`", IN_SANDBOX),
    "passes_tests": ("Python, which runs it", IN_SANDBOX),
}
"""Templates of rewards, with the packages that parse an answer. Those for programs find the code in it by `re`."""
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
        **{f"reward `{name}`": row for name, row in OF_TEMPLATES.items()},
        **{f"environment `{name}`": row for name, row in OF_ENVIRONMENTS.items()},
        **ELSEWHERE,
    }
    lines = [f"| {name} | {package} | {where} |" for name, (package, where) in rows.items()]
    return "\n".join(["| text goes to | parsed by | where |", "|---|---|---|", *lines])
