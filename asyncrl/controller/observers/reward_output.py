"""Says once where the output of reward functions is."""

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.controller.observers.events import Event, SampleScored, StepDone
from asyncrl.telemetry.run_directory import RunDirectory


@dataclass(slots=True)
class RewardOutput:
    """Looks for the files after each step and each failed reward, until it has said where they are."""

    directory: RunDirectory
    say: Callable[[str], None]
    is_said: bool = False

    def observe(self, event: Event) -> None:
        if self.is_said:
            return
        match event:
            case StepDone():
                self._look()
            case SampleScored(score=score) if score.error:
                self._look()

    def _look(self) -> None:
        if files := sorted(map(str, self.directory.printed())):
            self.is_said = True
            self.say(f"reward functions print something: {', '.join(files)} (the newest 4 to 8 MiB are kept)")
