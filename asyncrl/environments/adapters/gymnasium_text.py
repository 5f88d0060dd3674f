"""Episodes of Gymnasium environments whose actions are texts or numbers, such as FrozenLake."""

import re
from typing import Any

from asyncrl.environments.adapters.packages import OwnRandomness, after_prompt, package
from asyncrl.environments.observation import Observation
from asyncrl.errors import ConfigError
from asyncrl.protocols.answer_text import UNSPACED, folded, split_thoughts

ANSI = re.compile(r"\x1b\[[\d;]*m")
LETTER = rf"[^\W_{UNSPACED}]"
"""A letter or digit of a script whose words stand between spaces."""
NUMBER = re.compile(rf"(?<!{LETTER})(?<!\d-)(?<!{LETTER}[_.,])-?\d+(?!{LETTER}|[_.,]{LETTER})")


class GymnasiumText:
    """Plays `gymnasium.make(id)`. Its actions are a space `Text`, which gets the answer as it is, or `Discrete`, which
    gets the last number of the answer, or of `actions`, names of the actions in order, the one that is named last, as
    whole words in any case; of names at one place it is the longest. What is said in thoughts does not count. An answer
    without an action is told so and costs a turn. options: of the Gymnasium environment. rendered: shows what
    its mode `ansi` draws, without colours, instead of the observation."""

    def __init__(
        self, id: str, actions: list[str] | None = None, options: dict[str, Any] | None = None, rendered: bool = False
    ) -> None:
        self._id = id
        self._actions = actions
        self._name = _names(actions) if actions else None
        self._options = dict(options or {}) | ({"render_mode": "ansi"} if rendered else {})
        self._rendered = rendered
        self._environment: Any = None
        self._randomness = OwnRandomness(0)

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begins an episode: the prompt of the row, then the first observation."""
        self._randomness = OwnRandomness(seed)
        with self._randomness.used():
            self._environment = self._made()
            first, _ = self._environment.reset(seed=seed % 2**31)
            shown = self._shown(first)
        return Observation(after_prompt(row.get("prompt", ""), shown))

    async def step(self, message: str, opened: bool = False) -> Observation:
        """Takes the action that the answer names."""
        action = self._action(split_thoughts(message, opened)[1])
        if action is None:
            return Observation(f"Your answer names no action; {self._choices()}")
        with self._randomness.used():
            observed, reward, terminated, truncated, _ = self._environment.step(action)
            return Observation(self._shown(observed), float(reward), bool(terminated or truncated))

    async def close(self) -> None:
        """Closes the environment of Gymnasium, such as a window or a game that it opened."""
        if self._environment is not None:
            self._environment.close()

    def _made(self) -> Any:
        gymnasium = package("gymnasium")
        try:
            made = gymnasium.make(self._id, **self._options)
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"environment.use: gymnasium cannot make {self._id}: {error}") from None
        spaces = gymnasium.spaces
        if not isinstance(made.action_space, spaces.Text | spaces.Discrete):
            raise ConfigError(
                f"environment.use: the actions of {self._id} are {made.action_space}; a policy writes actions of the "
                "spaces Text and Discrete. Wrap it with gymnasium.ActionWrapper and register the result."
            )
        return made

    def _action(self, message: str) -> Any:
        space = self._environment.action_space
        if not hasattr(space, "n"):
            return message
        answer = split_thoughts(message)[1]
        if self._name is not None:
            named = list(self._name.finditer(folded(answer)))
            return int(space.start) + int(str(named[-1].lastgroup)[1:]) if named else None
        numbers = NUMBER.findall(answer[-1000:])
        return number if numbers and (number := int(numbers[-1])) in space else None

    def _choices(self) -> str:
        if self._actions is not None:
            return f"actions are {', '.join(self._actions)}"
        space = self._environment.action_space
        return f"actions are the numbers {space.start} to {space.start + space.n - 1}"

    def _shown(self, observed: Any) -> str:
        drawn = self._environment.render() if self._rendered else observed
        return ANSI.sub("", str(drawn))


def _names(actions: list[str]) -> re.Pattern[str]:
    """Returns what finds the name of an action, in the group `a` with its number; the longest name comes first."""
    names = {number: folded(name).split() for number, name in enumerate(actions)}
    if empty := [number for number, words in names.items() if not words]:
        raise ConfigError(f"environment.options: the name of action {empty[0]} is empty")
    longest = sorted(names, key=lambda number: -len(" ".join(names[number])))
    choices = [f"(?P<a{number}>" + r"\s+".join(map(re.escape, names[number])) + ")" for number in longest]
    inside = rf"(?<={LETTER})(?={LETTER})|(?<={LETTER}_)(?={LETTER})|(?<={LETTER})(?=_{LETTER})"
    return re.compile(rf"(?!{inside})(?:{'|'.join(choices)})(?!{inside})")
