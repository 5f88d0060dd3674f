"""Mistakes on the command line: words, flags, environment variables and directories."""

from pathlib import Path

from tests.unit.deploy.mistakes.mistake import Answered, Mistake, each

RUN = "run mine.toml"
NO_RUN = "holds no run: name a run directory, as made by `asyncrl run --run-dir`"


@each(
    Mistake("train", "train mine.toml", "there is no command 'train'; did you mean `asyncrl run`?"),
    Mistake("resume", "resume runs/x", "did you mean `asyncrl run`?"),
    Mistake("status", "status runs/x", "did you mean `asyncrl monitor`?"),
    Mistake("logs", "logs runs/x", "did you mean `asyncrl monitor`?"),
    Mistake("serve", "serve generation", "did you mean `asyncrl join`?"),
    Mistake("list", "list", "did you mean `asyncrl experiments`?"),
    Mistake("kill", "kill runs/x", "did you mean `asyncrl stop`?"),
    Mistake("eval", "eval runs/x", "did you mean `asyncrl evaluate`?"),
    Mistake("version", "version", "did you mean `asyncrl --version`?"),
    Mistake("file-first", "mine.toml", "did you mean `asyncrl run mine.toml`?"),
    Mistake("experiment-first", "quickstart", "did you mean `asyncrl run quickstart`?"),
    Mistake("flag-first", "--run-dir x run mine.toml", "the command comes first, and then its options"),
)
def test_words_that_are_no_command(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("one-dash", f"{RUN} -steps 3", "-steps: flags begin with two dashes: write --steps 3"),
    Mistake("hydra", f"{RUN} training.learning_rate=1e-5", "write --training.learning_rate=1e-5"),
    Mistake("hydra-plus", f"{RUN} +training.learning_rate=1e-5", ": write --training.learning_rate=1e-5"),
    Mistake("spaces", f"{RUN} --steps = 3", "write --steps=3 without spaces"),
    Mistake(
        "two-files", f"{RUN} other.toml", "a command takes one file; a file takes over the keys of another one with"
    ),
    Mistake("config-flag", "run --config mine.toml", "the experiment comes first: `asyncrl run mine.toml`"),
    Mistake("run-dir-underscore", f"{RUN} --run_dir out", "use the flag --run-dir"),
    Mistake("resume-flag", f"{RUN} --resume", "a run is resumed by its directory: `asyncrl run --run-dir DIR`"),
    Mistake("dry-run", f"{RUN} --dry-run", "`asyncrl try FILE` runs a few rows without training"),
    Mistake("verbose", f"{RUN} --verbose", "in the folder `logs` of its directory"),
    Mistake("gpus", f"{RUN} --gpus 2", 'such as training.device = "cuda:0"'),
    Mistake("device", f"{RUN} --device cuda", "did you mean training.device or generation.device?"),
    Mistake("batch-size", f"{RUN} --batch_size 8", "write task.prompts_per_step (a number of prompts"),
    Mistake("max-length", f"{RUN} --max_length 9", "write generation.max_new_tokens"),
    Mistake("no-switch", f"{RUN} --telemetry.trace maybe", "--telemetry.trace, which takes true or false"),
    Mistake("exponent", f"{RUN} --steps 1e3", "must be a valid integer, not '1e3'; write a number without an exponent"),
    Mistake("seconds", f"{RUN} --reward.deadline 10s", "must be a valid number, not '10s'; write a number without s"),
    Mistake("gigabytes", f"{RUN} --generation.cache_gb 4GB", "write a number without GB"),
    Mistake("percent", f"{RUN} --training.learning_rate 1%", "write a number without %"),
    Mistake("one-beta", f"{RUN} --training.betas 0.9", "--training.betas: item 2: is missing"),
    Mistake("three-betas", f"{RUN} --training.betas [0.9,0.95,0.99]", "must have 2 or fewer entries"),
    Mistake("half-precision", f"{RUN} --model.dtype fp16", "must be 'float32' or 'bfloat16', not 'fp16'"),
    Mistake("other-cluster", f"{RUN} --on slurm", "there is no 'slurm'; write --on ray"),
    Mistake("variable", RUN, "did you mean ASYNCRL_STEPS?", environ={"ASYNCRL_STEP": "3"}),
    Mistake("value-of-variable", RUN, "not 'many'", environ={"ASYNCRL_STEPS": "many"}),
)
def test_flags_of_a_run(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("nothing", "samples", "`asyncrl samples` needs run: Name the run directory to read"),
    Mistake("option", "samples model --stpe 3", "`asyncrl samples` has no option --stpe; did you mean --step?"),
    Mistake("option-value", "dashboard --port web", "--port: must be a whole number, not 'web'"),
    Mistake("count", "samples model -n x", "-n: must be a whole number of 1 or more, not 'x'"),
    Mistake("rows", "try mine.toml --rows 0", "--rows: must be a whole number of 1 or more, not '0'"),
    Mistake("no-value", "export model out --step", "--step: needs a value"),
    Mistake("target", "export model", "`asyncrl export` needs target: Name a folder"),
    Mistake("spare", "audit model more", "`asyncrl audit` has no use for 'more'"),
    Mistake("no-fit", "preferences", "`asyncrl preferences` needs fit"),
    Mistake("no-key", "join generation --to tcp://127.0.0.1:1", "`asyncrl join` needs --key"),
    Mistake("graph", "graph", "name an experiment or its TOML file first: `asyncrl graph quickstart`"),
    Mistake("plan", "plan --steps 3", "name an experiment or its TOML file first: `asyncrl plan quickstart`"),
    Mistake("experiments", "experiments quickstart", "`asyncrl experiments` takes no arguments"),
    Mistake("doctor", "doctor quikstart", "there is no experiment 'quikstart'; did you mean quickstart?"),
    Mistake(
        "search-key",
        "tune mine.toml --search training.lr=1..2",
        "there is no key training.lr; write training.learning_rate",
    ),
    Mistake("search-value", "tune mine.toml --search training.learning_rate=3", "two different values"),
    Mistake("search-seed", "tune mine.toml --search seed=1,2", "all candidates have the same seeds"),
    Mistake("metric", "tune mine.toml --search training.updates=1,2 --metric reward", "did you mean reward/mean?"),
)
def test_arguments_of_other_commands(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("samples-gone", "samples runs/mine-1", "there is no folder runs/mine-1; did you mean runs/mine-2?"),
    Mistake("report-gone", "report runs/mine-1", "there is no folder runs/mine-1; did you mean runs/mine-2?"),
    Mistake("audit-gone", "audit runs/mine-1", "there is no folder runs/mine-1; did you mean runs/mine-2?"),
    Mistake("resume-gone", "run --run-dir runs/mine-1", "there is no folder runs/mine-1; did you mean runs/mine-2?"),
    Mistake("monitor-all", "monitor runs", "runs is a folder of runs: name one of them, such as"),
    Mistake("export-all", "export runs out", "runs is a folder of runs: name one of them, such as runs/mine-2"),
    Mistake("samples-file", "samples mine.toml", "mine.toml is a file: name the directory of a run"),
    Mistake("report-model", "report model", f"model {NO_RUN}"),
    Mistake("push-model", "push model me/mine", f"model {NO_RUN}"),
    Mistake("replay-model", "replay model", f"model {NO_RUN}"),
    Mistake("monitor-model", "monitor model", NO_RUN),
    Mistake("stop-model", "stop model", NO_RUN),
    Mistake("scale-model", "scale model generation=2", NO_RUN),
    Mistake("pause-ended", "pause runs/mine-2", ("no run goes on in ", "runs/mine-2")),
    Mistake("samples-untrained", "samples runs/mine-2", "runs/mine-2 has no samples.jsonl"),
    Mistake("run-dir-is-a-file", f"{RUN} --run-dir rows.jsonl", "cannot use rows.jsonl as run directory: it is a file"),
    Mistake("run-dir-is-a-model", f"{RUN} --run-dir model", "model is not empty and holds no run of asyncrl"),
)
def test_directories_that_hold_no_run(mistake: Mistake, answered: Answered, workplace: Path) -> None:
    run = workplace / "runs/mine-2"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    answered(mistake)


def test_help_with_a_command_behind_it_is_that_of_the_command(answered: Answered) -> None:
    says = "usage: asyncrl run NAME|FILE"
    answered(Mistake("help", "help run", says, code=0, lines=25))
