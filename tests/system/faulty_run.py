"""`asyncrl` whose runs meet a fault: `faulty_run.py run ... `, told by FAULTS in the environment, a JSON object.

"standins": true              services without torch (torchless.py) instead of generation and training
"at": [WHO, POINT, VERSION]   at this point of the checkpoint of this version WHO is killed: "controller", which is
                              this process, "training", or "writing": the trainer itself, while it writes
"died": FILE                  made when that happened; it happens once
"""

import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.checkpoint import Manifest, commit
from asyncrl.config import Config
from asyncrl.deploy import cli, run
from asyncrl.fleet import ServiceSpec
from asyncrl.ledger import Journal
from asyncrl.protocols.contracts import Generation, Reward, Training
from asyncrl.protocols.messages import Checkpointed

FAULTS: dict[str, Any] = json.loads(os.environ.get("FAULTS", "{}"))
WHO, POINT, VERSION = FAULTS.get("at", ["", "", -1])
DIED = Path(FAULTS.get("died", "/nonexistent"))


def pid_of(run_dir: Path, service: str) -> int:
    workers = json.loads((run_dir / "fleet.json").read_text())["workers"]
    (pid,) = [worker["pid"] for worker in workers if worker["service"] == service]
    return int(pid)


def dead(pid: int) -> bool:
    """Ended; perhaps not buried yet."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


async def faulty_commit(journal: Journal, write: Callable[[str], Awaitable[Checkpointed]], keep: int) -> Manifest:
    def fault(point: str) -> None:
        if (point, journal.ledger.version) != (POINT, VERSION) or DIED.exists():
            return
        DIED.touch()
        if WHO == "controller":
            os.kill(os.getpid(), signal.SIGKILL)
        victim = pid_of(Path(journal.store.path("")).parent, WHO)
        os.kill(victim, signal.SIGKILL)
        while not dead(victim):
            time.sleep(0.001)

    return await commit(journal, write, keep, fault)


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


async def no_model(config: Config, target: Path, say: Callable[[str], None]) -> Path:
    return _folder(target)


def standin_specs(config: Config, **asked: object) -> list[ServiceSpec]:
    training = {"step_time": 0.02, "dies": [POINT, VERSION] if WHO == "writing" else [], "died": str(DIED)}
    return [
        ServiceSpec(
            "generation",
            Generation,
            "torchless:TorchlessGeneration",
            replicas=config.generation.replicas,
            options={"token_time": 0.002},
        ),
        ServiceSpec("reward", Reward, "asyncrl.services.reward:RewardService"),
        ServiceSpec("training", Training, "torchless:TorchlessTraining", options=training),
    ]


if __name__ == "__main__":
    run.commit = faulty_commit
    if FAULTS.get("standins"):
        run.prepare, run.service_specs = no_model, standin_specs
    sys.exit(cli.main())
