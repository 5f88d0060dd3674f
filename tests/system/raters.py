"""A scripted person: asks the feedback endpoint of a run for answers, and rates them by a taste of its own.

`python tests/system/raters.py RUN` rates until it is interrupted.
"""

import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

Taste = Callable[[str], int]
"""A rating from 1 to 5 of a text."""
RETRY = 0.05
"""Seconds until the page is asked again when nothing waits, or its worker is being started again."""


def likes_vowels(text: str) -> int:
    """Returns 5 for an answer that begins with a vowel, else 1."""
    return 5 if text[:1] in tuple("aeiou") else 1


class Rater:
    """Rates on a thread of its own within `with`. kept: name and value of each rating that was answered with 200.
    late: number of them that came too late. refused: names of answers that were no longer known."""

    def __init__(self, run_dir: Path, taste: Taste) -> None:
        self._address = run_dir / "feedback.json"
        self._taste = taste
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rater", daemon=True)
        self.kept: dict[str, float] = {}
        self.late = 0
        self.refused: list[str] = []

    def __enter__(self) -> "Rater":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(20)

    def _run(self) -> None:
        while not self._address.exists():
            if self._stopped.wait(RETRY):
                return
        address = json.loads(self._address.read_text())
        headers = {"Authorization": f"Bearer {address['key']}"}
        with httpx2.Client(base_url=f"http://{address['host']}:{address['port']}", headers=headers) as client:
            while not self._stopped.is_set():
                answers: list[dict[str, Any]] = []
                with suppress(httpx2.TransportError):
                    answers = client.get("/answers", timeout=5).json()["answers"]
                    for answer in answers:
                        self._rate(client, answer)
                if not answers:
                    self._stopped.wait(RETRY)

    def _rate(self, client: httpx2.Client, answer: dict[str, Any]) -> None:
        said = {"sample": answer["sample"], "rating": self._taste(answer["text"])}
        got = client.post("/ratings", json=said, timeout=5)
        if got.status_code == 200:
            self.kept[answer["sample"]] = got.json()["values"][0]
            self.late += got.json()["late"]
        else:
            assert got.status_code == 404, got.text
            self.refused.append(answer["sample"])


if __name__ == "__main__":
    with Rater(Path(sys.argv[1]), likes_vowels), suppress(KeyboardInterrupt):
        threading.Event().wait()
