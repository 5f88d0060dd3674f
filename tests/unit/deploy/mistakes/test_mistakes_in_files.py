"""Mistakes in the file of an experiment: TOML that is none, and keys and values that are wrong."""

from tests.unit.deploy.mistakes.mistake import BASE, Answered, Mistake, beside, each, scored_by

RUN = "run mine.toml"
INVALID = "mine.toml: this is not valid TOML: "


@each(
    Mistake("unquoted", RUN, ("line 2", 'quotation marks: name = "model"'), BASE.replace('"model"', "model")),
    Mistake("unquoted-path", RUN, 'prompts = "./rows.jsonl"', BASE.replace('"rows.jsonl"', "./rows.jsonl")),
    Mistake("curly-quotes", RUN, ("line 4", "straight quotation"), BASE.replace('"rows.jsonl"', "“rows.jsonl”")),
    Mistake("open-quote", RUN, ("line 2", "mark is not closed"), BASE.replace('"model"', '"model')),
    Mistake("colon", RUN, ("line 2", "write KEY = VALUE, not KEY: VALUE"), BASE.replace("name =", "name:")),
    Mistake("two-equals", RUN, ("line 2", "write one = sign"), BASE.replace("name =", "name ==")),
    Mistake("no-value", RUN, ("line 2", "name has no value"), BASE.replace(' "model"', "")),
    Mistake("python-none", RUN, ("line 8", "leave the key out"), beside("[algorithm]\nweight_cap = None\n")),
    Mistake("json-null", RUN, ("line 8", "leave the key out"), beside("[algorithm]\nweight_cap = null # off\n")),
    Mistake("python-true", RUN, ("line 8", "small letters"), beside("[telemetry]\ntrace = True\n")),
    Mistake("decimal-comma", RUN, ("line 8", "has a point"), beside("[training]\nlearning_rate = 0,001\n")),
    Mistake("bare-point", RUN, ("line 8", "1.0e-6"), beside("[training]\nlearning_rate = 1.e-6\n")),
    Mistake("slashes-comment", RUN, ("line 7", "begins with #"), beside("// a comment\n")),
    Mistake("open-bracket", RUN, ("line 7", "bracket of the section is not closed"), beside("[training\n")),
    Mistake("section-twice", RUN, ("line 7", "[task] is there twice"), beside("[task]\nsize = 3\n")),
    Mistake("key-twice", RUN, ("line 8", "has a value already"), beside("on_error = 1\non_error = 2\n")),
    Mistake("windows-path", RUN, ("line 4", "write / or"), BASE.replace('"rows.jsonl"', r'"C:\Users\me\rows.jsonl"')),
    Mistake("json-text", RUN, ("line 1", "this is JSON"), '{"model": {"name": "model"}}'),
    Mistake(
        "utf-16", RUN, "not UTF-8 text: invalid start byte at byte 0; save it as UTF-8", "", {"mine.toml": b"\xff\xfe["}
    ),
)
def test_a_file_that_is_no_toml_is_answered_with_its_line_and_what_to_write(
    mistake: Mistake, answered: Answered
) -> None:
    said = answered(mistake)
    assert said.startswith(f"asyncrl: {INVALID}") or mistake.name == "utf-16"


@each(
    Mistake(
        "yaml", "run mine.yaml", ("mine.yaml is no experiment", "`asyncrl init NAME`"), files={"mine.yaml": "a: 1"}
    ),
    Mistake(
        "json", "run mine.json", ("mine.json is no experiment", "[task] prompts = FILE"), files={"mine.json": "{}"}
    ),
    Mistake("rows", "run rows.jsonl", ("rows.jsonl is no experiment", "[task] prompts = FILE")),
    Mistake("script", "run mine.py", ("mine.py is no experiment", "run with python")),
    Mistake("other-run", "run model", "model is a folder; a run that lies in one is resumed with --run-dir model"),
    Mistake("circle", RUN, "extends goes round in a circle: ", 'extends = "mine.toml"\n' + BASE),
    Mistake("base-gone", RUN, "mine.toml: extends: there is no file", 'extends = "base.toml"\n' + BASE),
    Mistake(
        "base-typo", RUN, "extends: there is no experiment 'quikstart'; did you mean", 'extends = "quikstart"\n' + BASE
    ),
    Mistake("base-table", RUN, "extends: must be the name of a file", "extends = {a = 1}\n" + BASE),
    Mistake("include", RUN, 'include: there is no such key; write extends = "FILE"', 'include = "base.toml"\n' + BASE),
    Mistake("empty", RUN, ("model.name: has no default", "task.prompts: has no default"), "", lines=3),
)
def test_files_that_are_no_experiment(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake(
        "key-below-a-section",
        RUN,
        "mine.toml:7: reward.steps: there is no such key; did you mean steps?",
        beside("steps = 3\n"),
    ),
    Mistake("key-above-sections", RUN, "mine.toml:1: learning_rate: ", "learning_rate = 1e-5\n" + BASE),
    Mistake(
        "model-is-text",
        RUN,
        "mine.toml:1: model: model is a section: write model.name",
        'model = "model"\n[task]\nprompts = "rows.jsonl"\n',
    ),
    Mistake(
        "reward-is-text",
        RUN,
        "reward is a section: write reward.functions",
        'reward = "exact_match"\n' + BASE.partition("[reward]")[0],
    ),
    Mistake("no-list", RUN, 'write ["exact_match"]', scored_by('"exact_match"')),
    Mistake(
        "single-bracket",
        RUN,
        'write [{ use = "exact_match" }]',
        BASE.replace("[reward]\nfunctions = [", '[reward.functions]\nuse = "exact_match"\n#'),
    ),
    Mistake(
        "optimizer-section",
        RUN,
        ("write training.optimizer", "write training.learning_rate"),
        beside("[optimizer]\nname = 'adam'\nlr = 3e-4\n"),
        lines=3,
    ),
    Mistake(
        "trainer-section", RUN, "did you mean training.learning_rate?", beside("[trainer]\nlearning_rate = 1e-5\n")
    ),
    Mistake("max-tokens", RUN, "write generation.max_new_tokens", beside("[generation]\nmax_tokens = 100\n")),
    Mistake(
        "reward-weights", RUN, "each function has its weight: functions = [{ use", beside("weights = [0.5, 0.5]\n")
    ),
    Mistake(
        "lora-r",
        RUN,
        "model.lora: r: there is no such key; did you mean rank?",
        BASE.replace("[task]", "lora = { r = 8 }\n[task]"),
    ),
    Mistake(
        "lora-true",
        RUN,
        "model.lora: must be a table, written as { KEY = VALUE }, not true",
        BASE.replace("[task]", "lora = true\n[task]"),
    ),
    Mistake(
        "function-key",
        RUN,
        ("use: is missing", "function: there is no such key; did you mean use?"),
        scored_by('[{ function = "mine.py:reward" }]'),
    ),
    Mistake(
        "bare-option", RUN, "options = { column = ... }", scored_by('[{ use = "exact_match", column = "answer" }]')
    ),
    Mistake(
        "stop-number",
        RUN,
        "generation.stop: must be a list, written as [...], not 3",
        beside("[generation]\nstop = 3\n"),
    ),
    Mistake("fraction-of-steps", RUN, "mine.toml:1: steps: must be a valid integer", "steps = 1.5\n" + BASE),
    Mistake(
        "another-program",
        RUN,
        ("30 mistakes in the configuration", "a29.b29: there is no such key"),
        "".join(f"[a{i}]\nb{i} = 1\n" for i in range(30)) + BASE,
        lines=31,
    ),
)
def test_wrong_keys_and_values(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)
