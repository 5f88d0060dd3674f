"""A run is refused with all its problems at once, and says once what nothing reads; doctor prints the same."""

import json
import re
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from asyncrl.children.containment import Containment, WithoutNetwork
from asyncrl.config.named_files import source_files
from asyncrl.config.problems import Problem, refuse
from asyncrl.config.schema import Config
from asyncrl.deploy import preflight as preflight_module
from asyncrl.deploy.commands import doctor
from asyncrl.deploy.preflight import (
    callback_problems,
    code_of_user,
    containment_problems,
    devices,
    model_problems,
    preflight,
    scoring_folders,
    step_callback,
)
from asyncrl.deploy.run_fleet import RunRequest
from asyncrl.deploy.run_setup import run
from asyncrl.errors import ConfigError, TaskError
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.tasks import source_problems
from asyncrl.telemetry.display import open_display
from tests import golden
from tests.unit.letter_model import write_letter_model

PACKAGED = Path("pypi:smollm2")
UNREAD = 'algorithm.dual_clip, algorithm.loss: nothing reads it with loss = "gspo": remove it'


def config(**sections: Any) -> Config:
    task = {"prompts": "nowhere.jsonl"}
    return Config.model_validate({"model": {"name": "warmed:reverse"}, "task": task} | sections)


async def started(chosen: Config, run_dir: Path) -> str:
    """Starts a run that is refused; returns what it printed and why it was refused."""
    stream = StringIO()
    with open_display(1, stream) as display, pytest.raises((ConfigError, TaskError)) as refused:
        await run(RunRequest(chosen, run_dir, display, "asyncrl run"))
    return f"{stream.getvalue()}{refused.value}"


async def test_a_run_says_once_what_nothing_reads(tmp_path: Path) -> None:
    chosen = config(
        task={"prompts": "asyncrl.tasks.builtin.reverse:training", "options": {"colour": "red"}},
        algorithm={"preset": "gspo", "dual_clip": 3},
        reward={"functions": ["exact_match"]},
    )
    printed = await started(chosen, tmp_path / "run")
    assert "takes no colour" in printed
    assert printed.count(f"warning: {UNREAD}") == printed.count("warning") == 1


async def test_a_run_is_refused_with_all_problems_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "available_memory", lambda: 2**20)
    chosen = config(algorithm={"custom": "gone.py:ALGORITHM"}, reward={"functions": ["exact_mach"]})
    text = await started(chosen, tmp_path / "run")
    assert text.startswith("4 problems:\n")
    for part in ("of memory are available", "did you mean exact_match?", "gone.py", "there is no file nowhere.jsonl"):
        assert part in text
    assert not (tmp_path / "run").exists()


def test_sources_of_prompts_are_problems_with_their_key_and_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rows(size):\n    raise RuntimeError('this is not called')\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    chosen = config(
        task={"prompts": f"{tmp_path}/mine.py:row", "pretrain": f"{tmp_path}/gone.csv"},
        algorithm={"pretrain_coefficient": 0.1},
        evaluate={"prompts": str(tmp_path / "rows.jsonl")},
        reward={"functions": ["exact_match"]},
    )
    places = {"task.prompts": "mine.toml:3"}
    found = [str(problem) for problem in preflight(chosen, places=places)]
    assert [text.partition("; found are")[0] for text in found] == [
        f"mine.toml:3: task.prompts: {tmp_path}/mine.py has no row; did you mean rows?",
        f"task.pretrain: there is no file {tmp_path}/gone.csv; there are rows.jsonl",
        f'evaluate.prompts: {tmp_path}/rows.jsonl, line 2: there is no column "prompt"',
    ]


def test_a_large_file_of_prompts_is_left_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_problems, "READ_AHEAD", 4)
    (tmp_path / "rows.jsonl").write_text("no JSON")
    chosen = config(task={"prompts": str(tmp_path / "rows.jsonl")}, reward={"functions": ["exact_match"]})
    assert list(preflight(chosen)) == []


def test_a_page_at_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    task = {"prompts": str(tmp_path / "rows.jsonl")}
    found = {}
    for host in ("127.0.0.2", "localhost", "203.0.113.7"):
        chosen = config(task=task, reward={"functions": ["exact_match"]}, feedback={"ask": "rate", "host": host})
        found[host] = [str(each) for each in preflight(chosen) if not each.is_warning]
    (problem,) = found.pop("203.0.113.7")
    assert problem.startswith("feedback.host: 203.0.113.7:0 cannot be listened at: ")
    assert found == {"127.0.0.2": [], "localhost": []}


def test_an_address_of_metrics_that_is_taken_or_has_no_token_is_known_before_a_start(tmp_path: Path) -> None:
    with closing(bound_socket("127.0.0.1", 0, "a test")) as held:
        held.listen()
        taken = f"127.0.0.1:{held.getsockname()[1]}"
        found = []
        for telemetry in (
            {"prometheus": taken},
            {"prometheus": "127.0.0.1:0", "prometheus_token": str(tmp_path / "none")},
            {"prometheus": "127.0.0.1:0"},
        ):
            chosen = config(reward={"functions": ["exact_match"]}, telemetry=telemetry)
            found.append([str(each) for each in preflight(chosen) if each.key.startswith("telemetry")])
    assert [len(each) for each in found] == [1, 1, 0]
    assert f"telemetry.prometheus: {taken} cannot be listened at" in found[0][0]
    assert "telemetry.prometheus_token: " in found[1][0]


def test_a_run_that_takes_more_than_there_is_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "available_memory", lambda: 4 * 2**30)
    assert not list(model_problems(config(), PACKAGED))
    assert not list(model_problems(config(generation={"slots": 10**8}), Path("someone/unknown")))
    assert all(
        each.is_warning for each in model_problems(config(generation={"slots": 10**8, "device": "cuda"}), PACKAGED)
    )
    with pytest.raises(ConfigError, match=r"4\.0 GB of memory .*lower generation\.slots, which is 100000000"):
        refuse(model_problems(config(generation={"slots": 10**8}), PACKAGED))
    monkeypatch.setattr(preflight_module, "available_memory", lambda: 2**30)
    with pytest.raises(ConfigError, match=r"for training: take a smaller model \(model\.name\)"):
        refuse(model_problems(config(), PACKAGED))


@pytest.mark.parametrize(("answer", "refused"), [(19, False), (20, True), (21, True)])
def test_answers_that_leave_no_room_at_all_are_refused_without_the_model(
    answer: int, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 20}))
    found = "".join(map(str, model_problems(config(generation={"max_new_tokens": answer}), tmp_path)))
    says = rf"max_new_tokens.*: {answer} new tokens leave no room .* write fewer than 20"
    assert bool(re.search(says, found)) == refused


def test_a_folder_without_a_description_is_left_to_the_services_that_read_it(tmp_path: Path) -> None:
    assert not list(model_problems(config(generation={"max_new_tokens": 1 << 20}), tmp_path))


@pytest.mark.parametrize(
    ("free", "said", "fits"),
    [
        (2**20, "two versions of the weights take", False),
        (1.0762e9 + 10e6, "rows are sent as frames, which is slower", False),
        (1.0762e9 + 100e6, "if every token were the longest one, which would end the run", True),
        (2**40, "", True),
    ],
)
def test_shared_memory_that_runs_short_is_said_at_the_start_with_both_numbers(
    free: float, said: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module, "free_shared_memory", lambda: int(free))
    monkeypatch.setattr(preflight_module, "longest_token_of", lambda model: 300)
    monkeypatch.setattr(preflight_module, "available_memory", lambda: 2**50)
    chosen = config(generation={"max_new_tokens": 4096})
    found = [str(problem) for problem in model_problems(chosen, PACKAGED) if "shared memory" in problem.text]
    assert len(found) == bool(said)
    assert all(said in text for text in found)
    assert preflight_module.rows_fit(chosen, PACKAGED) == fits


def test_devices_of_hosts_that_join_are_not_looked_for_here() -> None:
    fleet = {"wire": "tcp", "listen": "tcp://127.0.0.1:7000", "joined": {"generation": 1}}
    chosen = config(fleet=fleet, generation={"device": "cuda:7"})
    assert devices(chosen) == {"training.device": "cpu"}
    assert not [problem for problem in preflight(chosen) if "cuda:7" in str(problem)]


def test_a_device_of_a_pool_that_is_not_here_is_refused_with_pool_and_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacks = [Problem(f"pools.gpus.devices[{at}]", "", f'"cuda:{at + 6}" cannot be used') for at in (0, 1)]
    monkeypatch.setattr(preflight_module, "device_mistakes", lambda devices: lacks)
    pools = {"gpus": {"devices": ["cuda:6", "cuda:7"]}}
    pooled = config(pools=pools, training={"pool": "gpus"}, generation={"pool": "gpus"})
    assert devices(pooled) == {"pools.gpus.devices[0]": "cuda:6", "pools.gpus.devices[1]": "cuda:7"}
    found = [problem for problem in preflight(pooled) if problem.key.startswith("pools.gpus")]
    assert [problem.key for problem in found] == ["pools.gpus.devices[0]", "pools.gpus.devices[1]"]
    assert {problem.others for problem in found} == {("training.pool", "generation.pool")}
    assert 'cuda:7" cannot be used' in str(found[1])


def test_models_that_were_downloaded_are_held_to_their_layouts(tmp_path: Path) -> None:
    write_letter_model(tmp_path)
    critic = {"model": str(tmp_path), "layout": {"tp": 2}}
    assert scoring_folders(config(algorithm={"preset": "ppo"}, critic=critic), tmp_path)["critic"] == tmp_path
    chosen = config(algorithm={"preset": "ppo"}, critic={**critic, "layout": {"tp": 3}})
    with pytest.raises(ConfigError, match=r"^critic\.layout: .*: tp = 3 does not divide num_attention_heads = 4"):
        scoring_folders(chosen, tmp_path)


MINE = "mine.py:right"


def contained(functions: list[Any], environment: dict[str, Any] | None = None, **children: Any) -> Config:
    sections = {"reward": {"functions": functions}, "environment": environment or {}, "children": children}
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **sections})


@pytest.mark.parametrize(
    ("function", "environment", "found"),
    [
        ("exact_match", {}, []),
        ("asyncrl.tasks.builtin.reverse:copied", {}, []),
        (MINE, {}, [MINE]),
        ("trl:mine.py:right", {}, ["trl:mine.py:right"]),
        ("asyncrl.py:right", {}, ["asyncrl.py:right"]),
        ("package.asyncrl:right", {}, ["package.asyncrl:right"]),
        ("exact_match", {"use": "guess"}, []),
        ("exact_match", {"use": "mine.py:Game"}, ["mine.py:Game"]),
        ("exact_match", {"use": "gymnasium:FrozenLake-v1"}, ["gymnasium:FrozenLake-v1"]),
        ("exact_match", {"use": "mcp:python server.py"}, ["mcp:python server.py"]),
        ("exact_match", {"use": "tools", "options": {"functions": [MINE]}}, ["tools"]),
    ],
)
def test_code_of_the_user_is_what_is_no_part_of_asyncrl(
    function: str, environment: dict[str, Any], found: list[str]
) -> None:
    assert code_of_user(contained([function], environment)) == found


def test_code_that_is_served_or_runs_elsewhere_is_no_childrens() -> None:
    found = contained([MINE], {"use": "mine.py:Game"})
    assert sorted(code_of_user(found)) == ["mine.py:Game", MINE]
    assert code_of_user(found, served=["reward"]) == ["mine.py:Game"]
    assert code_of_user(contained([])) == []
    for joined, here in (("reward", ["mine.py:Game"]), ("environment", [MINE])):
        fleet = found.fleet.model_copy(update={"joined": {joined: 1}})
        assert code_of_user(found.model_copy(update={"fleet": fleet})) == here


def test_without_bubblewrap_a_run_with_code_of_the_user_is_refused_and_others_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = containment_problems(contained([MINE]))
    assert problem.key == "children.sandbox"
    golden.says(problem)
    assert list(containment_problems(contained(["exact_match"]))) == []
    assert list(containment_problems(contained([MINE], sandbox="none"))) == []


def test_a_folder_to_write_has_to_be_there(tmp_path: Path) -> None:
    (problem,) = containment_problems(contained([MINE], writable=[str(tmp_path / "cache")]))
    assert (problem.key, problem.text.startswith(f"there is no folder {tmp_path}/cache")) == ("children.writable", True)
    assert list(containment_problems(contained([MINE], writable=[str(tmp_path)]))) == []
    for folder in ("/", "/tmp/..", "/proc", "/dev/shm"):
        (problem,) = containment_problems(contained([MINE], writable=[folder]))
        assert "name folders of your own" in problem.text, folder


@pytest.mark.parametrize(
    ("use", "network", "layers"),
    [
        ("agent:python agent.py", False, [WithoutNetwork, Containment]),
        ("agent:python agent.py", True, [Containment]),
        ("gymnasium:FrozenLake-v1", False, [Containment]),
    ],
)
def test_agents_without_the_network_are_tried_in_both_layers(
    use: str, network: bool, layers: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr("asyncrl.deploy.preflight.try_containment", lambda *found: tried.extend(found))
    assert list(containment_problems(contained(["exact_match"], {"use": use}, network=network))) == []
    assert [type(layer) for layer in tried] == layers


def test_doctor_says_what_contains_code() -> None:
    for sandbox in ("bubblewrap", "none"):
        (said,) = doctor._containment_checks(contained([MINE], sandbox=sandbox))
        golden.says(said, MINE)
    assert list(doctor._containment_checks(contained(["exact_match"]))) == []


SOURCE = """
def good_enough(metrics):
    return metrics["reward/mean"] > 0.5

async def waits(metrics):
    return True

number = 3
"""


def called(file: Path, name: str) -> Config:
    return Config.model_validate(
        {"model": {"name": "m"}, "task": {"prompts": "p"}, "telemetry": {"on_step": f"{file}:{name}"}}
    )


def test_the_function_of_a_file_is_called_and_the_file_belongs_to_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    named = called(file, "good_enough")
    assert list(callback_problems(named)) == []
    function = step_callback(named)
    assert function is not None
    assert [function({"reward/mean": mean}) for mean in (0.25, 0.75)] == [False, True]
    assert ("telemetry.on_step", file) in set(source_files(named))
    assert step_callback(Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}})) is None


@pytest.mark.parametrize("name", ["waits", "number"])
def test_what_cannot_be_called_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    with golden.raises(ConfigError, match=f":{name}: "):
        step_callback(called(tmp_path / "mine.py", name))
