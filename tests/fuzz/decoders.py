"""All modules that turn bytes or text into values: the targets that feed them, or why they need none."""

import ast
from collections.abc import Iterator
from pathlib import Path

CALLS = {
    "json": ("load", "loads"),
    "msgpack": ("unpackb", "Unpacker"),
    "marshal": ("load", "loads"),
    "pickle": ("load", "loads"),
    "tomllib": ("load", "loads"),
    "np": ("frombuffer", "load", "fromfile"),
    "int": ("from_bytes",),
    "torch": ("load", "frombuffer"),
}
"""Functions that decode, by the name before the dot."""
METHODS = ("unpack", "unpack_from", "raw_decode", "validate_json", "model_validate", "model_validate_json")
"""Methods of any object that decode."""

FUZZED: dict[str, tuple[str, ...]] = {
    "children/child_messages.py": ("reward",),
    "controller/journal/checkpoints.py": ("manifest",),
    "controller/journal/run_copy.py": ("head",),
    "controller/journal/journal.py": ("journal", "records"),
    "engines/acting/stepping/answers.py": ("acting",),
    "environments/adapters/openenv_client.py": ("environment",),
    "environments/agents/chat_completions.py": ("chat",),
    "environments/tools/parsed_calls.py": ("tools",),
    "lanes/control/message_codec.py": ("codec", "worker", "controller", "joining"),
    "lanes/control/zmq_wire.py": ("port",),
    "lanes/data/row_file.py": ("row-file",),
    "lanes/weights/chunk_codec.py": ("weights",),
    "protocols/prompt_row.py": ("rows",),
    "rewards/feedback/web.py": ("feedback",),
    "rewards/remote_judge.py": ("judge",),
    "protocols/answer_text.py": ("judge", "environment"),
}
OWN = "a file of asyncrl"
RUN = "a file of the run, which its user alone writes"
USER = "a file that the user names"
MODEL = "a file of the user's model"
PARENT = "a pipe or socket between processes of one user, of which neither runs code of others"
INSIDE = "runs inside a sandbox, where an error fails the case"
VIEW = "a view of memory that this process filled, or of a segment whose layout was checked"
PROVEN = "from the controller, which the handshake proves"

UNFUZZED: dict[str, str] = {
    "children/code/code_runner.py": "what asyncrl's own checker prints; it compiles sources and runs none",
    "children/code/row_tests.py": USER,
    "children/code/source_checker.py": INSIDE,
    "children/sandbox/inside/examiner.py": INSIDE,
    "children/sandbox/inside/first_process.py": INSIDE,
    "children/sandbox/inside/package_server.py": INSIDE,
    "children/sandbox/inside/program_server.py": INSIDE,
    "children/sandbox/package_calls.py": "a line of a sandbox, of which one number is taken; its test has others",
    "rewards/execution/function_call.py": PARENT,
    "rewards/package_scores.py": "runs in the sandbox for programs, on what this process wrote",
    "config/install_hints.py": OWN,
    "config/sections/algorithm_config.py": OWN,
    "config/sections/secret.py": RUN,
    "lanes/bounded_msgpack.py": "the body of messages, which the targets of codec and pipes decode through it",
    "lanes/control/peer_guard.py": "events of ZeroMQ in this process and counters of the kernel",
    "config/sources/keys.py": OWN,
    "config/sources/layers.py": USER,
    "config/sources/load_config.py": USER,
    "controller/checkpointing.py": RUN,
    "deploy/checks/model_checks.py": MODEL,
    "rewards/number_parser.py": OWN,
    "deploy/checks/run_prompts.py": MODEL,
    "deploy/checks/memory_needs.py": MODEL,
    "deploy/commands/export.py": RUN,
    "deploy/commands/tuning_search.py": RUN,
    "deploy/commands/monitor.py": PROVEN,
    "deploy/run_fleet.py": RUN,
    "deploy/process/fork_client.py": PARENT,
    "deploy/process/fork_server.py": PARENT,
    "deploy/process/run_commands.py": RUN,
    "deploy/report/dashboard/recorded_samples.py": RUN,
    "deploy/report/worker_trace.py": RUN,
    "engines/acting/stepping/spaces.py": RUN,
    "engines/acting/stepping/environment_server.py": PARENT,
    "engines/acting/stepping/picture_server.py": PARENT,
    "engines/acting/stepping/stepping_child.py": VIEW,
    "engines/generation/attention.py": VIEW,
    "engines/generation/ranked_generation.py": "what the leader of the replica tells, decoded by the message codec",
    "engines/generation/turn_requests.py": "the transcript of the worker itself",
    "engines/generation/vllm/worker_extension.py": OWN,
    "engines/generation/vllm/option_problems.py": MODEL,
    "engines/models/model_shape.py": MODEL,
    "engines/models/model_families.py": MODEL,
    "engines/generation/vllm/vllm_generation.py": MODEL,
    "engines/models/lora.py": MODEL,
    "engines/generation/tokenization.py": MODEL,
    "engines/models/model_folder.py": MODEL,
    "engines/models/model_preparation.py": OWN,
    "engines/models/scoring_models.py": MODEL,
    "engines/models/warmed_model_cache.py": OWN,
    "engines/models/tensor_parts.py": RUN,
    "engines/training/policy_trainer.py": USER,
    "engines/ranks/rank_mesh.py": VIEW,
    "engines/training/trainer_checkpoint.py": RUN,
    "engines/models/prompt_pictures.py": MODEL,
    "environments/agents/verifiers_rollout.py": OWN,
    "environments/episode_server.py": PARENT,
    "environments/transcript.py": "a column of a row, which a generator wrote as JSON",
    "fleet/launching/run_access.py": RUN,
    "fleet/launching/joining_host.py": PROVEN,
    "fleet/launching/key_folder.py": USER,
    "fleet/worker/compute_thread.py": "a file that the worker itself has just written",
    "fleet/worker/worker_spec.py": PROVEN,
    "lanes/data/file_cache.py": "a cache of the user",
    "lanes/data/row_store.py": VIEW,
    "lanes/data/recorder.py": RUN,
    "lanes/weights/arena.py": VIEW,
    "lanes/weights/slot_memory.py": VIEW,
    "lanes/weights/transports/device_arena.py": VIEW,
    "lanes/weights/transports/weight_stream.py": VIEW,
    "protocols/seeds.py": "a digest that was just computed",
    "rewards/execution/child_server.py": PARENT,
    "services/generation.py": "a column of a row, which an environment wrote as JSON",
    "services/reward.py": "a column of a row, which a generator wrote as JSON",
    "simulation/planning/gpus.py": USER,
    "simulation/planning/model_size.py": MODEL,
    "simulation/planning/job_file.py": USER,
    "simulation/planning/pool_tables.py": OWN,
    "tasks/builtin/dialogue.py": USER,
    "config/written_values.py": USER,
    "tasks/row_files.py": USER,
    "tasks/builtin/guess_agent.py": "an example, which runs contained",
    "tasks/prompt_sources.py": USER,
    "tasks/prompt_rows.py": "a digest that was just computed",
    "telemetry/jsonl.py": RUN,
    "telemetry/run_status.py": RUN,
    "telemetry/source_copies.py": RUN,
}
ROOMS = ("asyncrl", "deploy", "services", "protocols")


def decoding_modules(root: Path) -> Iterator[str]:
    """Yields the modules of the package that decode, relative to it."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            name = path.relative_to(root / "asyncrl" if room == "asyncrl" else root).as_posix()
            if room == "asyncrl" and name.split("/")[0] in ("deploy", "services", "protocols", "bench"):
                continue  # Links to the rooms beside it.
            if decodes(path.read_text(encoding="utf-8")):
                yield name


def decodes(source: str) -> bool:
    """Returns whether a module calls a function that decodes."""
    return any(isinstance(node, ast.Call) and _is_decoding(node.func) for node in ast.walk(ast.parse(source)))


def _is_decoding(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    if isinstance(function.value, ast.Name) and function.attr in CALLS.get(function.value.id, ()):
        return True
    return function.attr in METHODS
