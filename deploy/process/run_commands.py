"""Runs what a person commands a running run to do: scale, profile, pause, unpause, stop."""

from dataclasses import dataclass

from asyncrl.controller.gate.pause_switch import PauseSwitch
from asyncrl.controller.observers.worker_profile import WorkerProfiles
from asyncrl.deploy.process.stop_signals import StopSignals
from asyncrl.errors import Refused
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.fleet.scaling import scale
from asyncrl.protocols.messages import Call
from asyncrl.telemetry.display import Display


@dataclass
class RunCommands:
    """Takes the calls of one run."""

    running: RunningFleet
    profiles: WorkerProfiles
    pauses: PauseSwitch
    signals: StopSignals
    display: Display

    async def run(self, call: Call) -> str:
        """Runs a command; returns what a person should read. Raises Refused for one that cannot be."""
        match call.method, call.args:
            case "scale", (str(service), int(count)):
                return self._said(scale(self.running, service, count))
            case "profile", (str(wanted), float(seconds)):
                self.display.say(f"recording a profile of {wanted} for {seconds:g} s")
                return await self.profiles.record(wanted, seconds)
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

    def _said(self, text: str) -> str:
        self.display.say(text)
        return text
