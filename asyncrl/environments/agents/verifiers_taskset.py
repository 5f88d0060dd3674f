"""Episodes of verifiers: its rollouts ask the policy as any agent does."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.environments.agents.agent import Agent
from asyncrl.errors import ConfigError

PROGRAM = Path(__file__).with_name("verifiers_rollout.py")


class VerifiersTaskset(Agent):
    """Plays the task number `index`, a column of the row, of a task set for one agent without tools. id: its module.
    python: the interpreter that has verifiers, which need not be the one of asyncrl. The reward is that of verifiers.
    """

    def __init__(
        self,
        id: str,
        python: str = "",
        variables: Mapping[str, str] | None = None,
        containment: Mapping[str, Any] | None = None,
    ) -> None:
        if not id:
            raise ConfigError('environment.use is "verifiers:" and a task set, such as "verifiers:gsm8k-v1"')
        command = [python or sys.executable, "-P", str(PROGRAM), id, "{index}"]
        super().__init__(shlex.join(command), variables, reward="last_line", containment=containment)
