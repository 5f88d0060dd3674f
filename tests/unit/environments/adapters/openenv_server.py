"""A server of the real OpenEnv, which plays a counting game. It runs in an environment of its own
(scripts/set-up-foreign), whose packages do not fit beside those of asyncrl, and prints its port."""

import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Answer(Observation):
    text: str


class Count(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, goal: str = "", **rest: Any) -> Answer:
        self.number = (seed or 0) % 10
        return Answer(text=f"Guess the {goal or 'number'}.")

    def step(self, action: Guess, timeout_s: float | None = None, **rest: Any) -> Answer:
        if action.message == "raise":
            raise ValueError("no such move")
        if action.message == "flood":
            return Answer(text="x" * 2**23)
        done = action.message.strip() == str(self.number)
        return Answer(text="yes" if done else "no", reward=float(done), done=done)

    @property
    def state(self) -> State:
        return State(step_count=0)


app = create_fastapi_app(Count, Guess, Answer, max_concurrent_envs=2)
with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
