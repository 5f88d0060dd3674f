"""An agent that plays `guess` with the policy. It is a program that knows of the OpenAI endpoint, and not of asyncrl's
services: it asks for one guess after the other, answers with hints, and prints 1.0 if the number was found.

asyncrl run guess-agent ──> python -m asyncrl.tasks.builtin.guess_agent SEED   (the row comes on standard input)
"""

import http.client
import json
import os
import sys
from urllib.parse import urlsplit

from asyncrl.environments.games import Guess

TURNS = 3
SECONDS = 60.0
"""Longest wait for a guess."""


def play(row: dict[str, str], seed: int) -> float:
    """Plays one game, and returns its reward."""
    game = Guess()
    messages = [{"role": "user", "content": row["prompt"]}]
    game.begin(seed)
    for _ in range(TURNS):
        guess = ask(messages)
        hint = game.answer(guess)
        if hint.done:
            return hint.reward
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": str(hint.text)}]
    return 0.0


def ask(messages: list[dict[str, str]]) -> str:
    """Returns what the policy says next in this conversation."""
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(address.netloc, timeout=SECONDS)
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    try:
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", f"{address.path}/chat/completions", body, headers)
        response = connection.getresponse()
        said = response.read()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise ConnectionError(f"the endpoint answered {response.status}: {said[:500]!r}")
    return str(json.loads(said)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    sys.stdout.write(f"{play(json.loads(sys.stdin.read()), int(sys.argv[1]))}\n")
