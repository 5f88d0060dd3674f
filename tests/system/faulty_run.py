"""`asyncrl` whose runs meet a fault: `faulty_run.py run ... `, told by FAULTS in the environment, a JSON object.

"standins": true              services without torch (torchless.py) instead of generation and training
"at": [WHO, POINT, VERSION]   at this point of the checkpoint of this version WHO is killed: "controller", which is
                              this process, "training", or "writing": the trainer itself, while it writes
"slow": VERSION                from which each step of the stand-in takes an hour
"died": FILE                  made when that happened; it happens once
"secrets": FILE               gets the secret key of each pair that is made, one a line
"""

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from commit_faults import faulty_commit
from watching import dead, pid_of, wait_until

from asyncrl.config.schema import Config
from asyncrl.controller import checkpointing
from asyncrl.controller.journal.checkpoints import Manifest, Spared
from asyncrl.controller.journal.journal import Journal
from asyncrl.deploy import cli, run_fleet, run_setup
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.protocols.messages import Checkpointed
from asyncrl.protocols.service_contracts import Generation, Reward, Training

FAULTS: dict[str, Any] = json.loads(os.environ.get("FAULTS", "{}"))
WHO, POINT, VERSION = FAULTS.get("at", ["", "", -1])
DIED = Path(FAULTS.get("died", "/nonexistent"))


async def commit_until_the_fault(
    journal: Journal, write: Callable[[str], Awaitable[Checkpointed]], keep: int, kept: Spared
) -> Manifest:
    version = journal.ledger.version  # Steps go on while the checkpoint is written.

    def fault(point: str) -> None:
        if (point, version) != (POINT, VERSION) or DIED.exists():
            return
        DIED.touch()
        if WHO == "controller":
            os.kill(os.getpid(), signal.SIGKILL)
        victim = pid_of(Path(journal.store.path("")).parent, WHO)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: dead(victim), "its death")

    return await faulty_commit(journal, write, keep, fault, kept)


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


async def no_model(config: Config, target: Path, say: Callable[[str], None]) -> Path:
    return _folder(target)


def standin_specs(config: Config) -> list[ServiceSpec]:
    training = {
        "slow": FAULTS.get("slow", -1),
        "step_time": 0.02,
        "dies": [POINT, VERSION] if WHO == "writing" else [],
        "died": str(DIED),
    }
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


def record_secrets(file: Path) -> None:
    """Note each pair of keys that this process makes."""
    made = CurveKeys.fresh

    def fresh() -> CurveKeys:
        keys = made()
        with file.open("a") as out:
            out.write(keys.secret + "\n")
        return keys

    CurveKeys.fresh = fresh


def use_standins() -> None:
    """Run services without torch instead of generation and training."""
    vars(run_setup)["prepare"] = no_model
    vars(run_fleet)["service_specs"] = standin_specs


if __name__ == "__main__":
    vars(checkpointing)["commit"] = commit_until_the_fault
    if FAULTS.get("secrets"):
        record_secrets(Path(FAULTS["secrets"]))
    if FAULTS.get("standins"):
        use_standins()
    sys.exit(cli.main())
