"""Runs what a person commands a running run to do: scale, profile, weights, pause, unpause, stop."""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.controller.controller import PauseSwitch
from asyncrl.controller.observers.inspection import WorkerProfiles, describe_weights
from asyncrl.deploy.process.scaled_services import Scaled, keep
from asyncrl.deploy.process.stop_signals import StopSignals
from asyncrl.errors import Refused
from asyncrl.fleet.fleet import RunningFleet, scale
from asyncrl.protocols.messages import Call
from asyncrl.protocols.service_contracts import Training
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.screen.display import Display


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
