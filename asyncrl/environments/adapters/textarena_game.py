"""Episodes of TextArena's games for one player."""

from typing import Any

from asyncrl.config.user_code import suggestion
from asyncrl.environments.adapters.packages import OwnRandomness, after_prompt, package
from asyncrl.environments.observation import Observation
from asyncrl.errors import ConfigError
from asyncrl.protocols.answer_text import split_thoughts


class TextArenaGame:
    """Plays `textarena.make(id)`, such as GuessTheNumber-v0. The game's first message is the prompt; the prompt of the
    row, where it has one, stands before it. Each observation has what is new since the turn before. The reward is the
    game's, at its end. options: of the game."""

    def __init__(self, id: str, options: dict[str, Any] | None = None) -> None:
        self._id = id
        self._options = dict(options or {})
        self._game: Any = None
        self._randomness = OwnRandomness(0)

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begins a game."""
        self._randomness = OwnRandomness(seed)
        with self._randomness.used():
            self._game = self._made()
            try:
                self._game.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise ConfigError(f"environment.use: {self._id} is no game for one player: {error}") from None
            shown = self._new_messages()
        return Observation(after_prompt(row.get("prompt", ""), shown))

    async def step(self, message: str, opened: bool = False) -> Observation:
        """Makes the move that the answer has."""
        with self._randomness.used():
            done, _ = self._game.step(split_thoughts(message, opened)[1])
            if not done:
                return Observation(self._new_messages())
            rewards, information = self._game.close()
        reason = str(information[0].get("reason") or "")
        return Observation(reason, reward=float((rewards or {}).get(0, 0.0)), done=True)

    def _made(self) -> Any:
        arena = package("textarena")
        known = package("textarena.envs.registration").ENV_REGISTRY
        if self._id not in known:
            raise ConfigError(f"environment.use: TextArena has no game {self._id}{suggestion(self._id, known)}")
        raw = f"{self._id}-raw"  # Without the wrapper that repeats all former messages in each observation.
        return arena.make(raw if raw in known else self._id, **self._options)

    def _new_messages(self) -> str:
        player, observed = self._game.get_observation()
        if isinstance(observed, str):
            return observed
        return "\n".join(str(text) for sender, text, _ in observed if sender != player)
