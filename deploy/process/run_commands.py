"""Runs what a person commands a running run to do (scale, profile, weights, pause, unpause, stop), and keeps the
numbers of workers that `asyncrl scale` asked for.

    asyncrl scale ──> keep ──> scaled.json: {"generation": {"config": 1, "workers": 3}} ──> scaled_specs ──> next start

A number counts until the config has another one than at the time of the command.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from asyncrl.controller.controller import PauseSwitch
from asyncrl.controller.observers.inspection import WorkerProfiles, describe_weights
from asyncrl.deploy.process.interrupts import StopSignals
from asyncrl.errors import ConfigError, Refused
from asyncrl.fleet.fleet import RunningFleet, ServiceSpec, scalable, scale
from asyncrl.protocols.messages import Call
from asyncrl.protocols.service_contracts import Training
from asyncrl.telemetry.display import Display
from asyncrl.telemetry.run_directory import RunDirectory, replace_text

# Numbers of workers for the next start.


@dataclass(frozen=True, slots=True)
class Scaled:
    """The workers of one service. config: replicas of its config. workers: number that was asked for."""

    config: int
    workers: int


def keep(file: Path, service: str, scaled: Scaled) -> None:
    """Keeps the number of one service for the next start. Raises OSError where nothing can be written."""
    kept = {**_read(file), service: scaled}
    differing = {name: asdict(each) for name, each in kept.items() if each.workers != each.config}
    replace_text(file, json.dumps(differing) + "\n")


def scaled_specs(specs: Sequence[ServiceSpec], file: Path, say: Callable[[str], None]) -> Iterator[ServiceSpec]:
    """Yields the specs of a run, with the numbers of workers that the last start of it had in the end. file: of the run
    directory. say: takes what a person should read. Raises ConfigError for a damaged file."""
    kept = _read(file)
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        scaled = kept.get(spec.name)
        if scaled is None or scaled.workers == spec.replicas:
            yield spec
        elif scaled.config != spec.replicas:
            say(
                f"{spec.name} begins with {spec.replicas} workers, as its config says since; `asyncrl scale` left it "
                f"with {scaled.workers}"
            )
            yield spec
        else:
            yield _scaled(spec, by_name, scaled, say)


def _scaled(
    spec: ServiceSpec, specs: Mapping[str, ServiceSpec], scaled: Scaled, say: Callable[[str], None]
) -> ServiceSpec:
    try:
        scalable(specs, spec.name, scaled.workers)
    except Refused as refused:
        say(
            f"{spec.name} begins with {spec.replicas} workers; `asyncrl scale` left it with {scaled.workers}: {refused}"
        )
        return spec
    say(
        f"{spec.name} begins with {scaled.workers} workers, as `asyncrl scale` left it; its config says {spec.replicas}"
    )
    return replace(spec, replicas=scaled.workers, joined=min(spec.joined, scaled.workers))


def _read(file: Path) -> dict[str, Scaled]:
    try:
        return {str(name): Scaled(**each) for name, each in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error}): delete it to begin with the config's workers") from error


@dataclass
class RunCommands:
    """Takes the calls of one run. replicas: of its config, by service."""

    running: RunningFleet
    profiles: WorkerProfiles
    pauses: PauseSwitch
    signals: StopSignals
    display: Display
    replicas: Mapping[str, int]

    async def run(self, call: Call) -> str:
        """Runs a command; returns what a person should read. Raises Refused for one that cannot be."""
        match call.method, call.args:
            case "scale", (str(service), int(count)):
                return self._said(scale(self.running, service, count) + self._kept(service, count))
            case "profile", (str(wanted), float(seconds)):
                self.display.say(f"recording a profile of {wanted} for {seconds:g} s")
                return await self.profiles.record(wanted, seconds)
            case "weights", (str(pattern),):
                return await describe_weights(self.running.handle("training", Training), pattern)
            case (("pause" | "unpause"), ()):
                return self._turn(call.method == "pause")
            case "stop", ():
                if not self.signals.end_in_order():
                    raise Refused("the run does not train yet, or it is ending already: send its process SIGINT")
                return "the run ends with a checkpoint, after its running step"
        raise Refused(f"this run takes no command {call.method!r} like this; both have to be of the same asyncrl")

    def _turn(self, on: bool) -> str:
        state = "paused" if on else "going on"
        if not self.pauses.turn(on):
            raise Refused(f"the run is {state} already")
        if not on:
            return self._said("the run goes on")
        return self._said("the run is paused: samples in flight and the running step end, nothing else begins")

    def _kept(self, service: str, count: int) -> str:
        """Keeps the new number of workers for a resume; returns what a person should read about it, if anything."""
        replicas = self.replicas[service]
        try:
            keep(RunDirectory(self.running.facts.run_dir).scaled, service, Scaled(replicas, count))
        except OSError as error:
            return f"; a resume begins with the {replicas} of the config, because this number cannot be kept ({error})"
        return ""

    def _said(self, text: str) -> str:
        self.display.say(text)
        return text
