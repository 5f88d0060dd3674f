"""Places for workers that join, and why a host may not take one."""

from collections.abc import Collection
from dataclasses import dataclass

from asyncrl.config.sections.device_pools import CPU, Device, DevicePool, Host


@dataclass(frozen=True, slots=True)
class Places:
    """The workers of one service that join. needed: places that have to be taken before the run begins, and of which
    one has to be taken again when all are lost. packages: whose versions have to agree. command: starts one. pool:
    whose hosts may join, with its devices; None: any host may that has the device."""

    needed: int
    packages: Collection[str]
    command: str
    pool: DevicePool | None = None
    device: Device = CPU

    def objection(self, service: str, host: Host) -> str:
        """Returns why a host may not run these workers, and what to do; "" if it may."""
        if (pool := self.pool) is None:
            return self._missing_device(service, host)
        if pool.hosts and host.name not in pool.hosts:
            listed = ", ".join(pool.hosts)
            return (
                f"{service} workers run in pool {pool.name!r}, whose hosts are {listed}, and this is {host.name}: add "
                f"it to the hosts of pools.{pool.name}, or join from one of them"
            )
        if lacking := host.lacks(pool.devices):
            found = ", ".join(host.gpus) or "no GPU"
            return (
                f"{service} workers run in pool {pool.name!r}, whose hosts have {', '.join(pool.devices)}; host "
                f"{host.name} has {found}, and lacks {', '.join(lacking)}: take a host that has them, or change "
                f"pools.{pool.name}"
            )
        return ""

    def _missing_device(self, service: str, host: Host) -> str:
        number = Device("cuda:0") if self.device == "cuda" else self.device
        if not host.lacks([number]):
            return ""
        found = ", ".join(host.gpus) or "no GPU"
        return (
            f"{service} workers compute on {self.device}, and host {host.name} has {found}: take a host that has it, "
            "or change their device in the experiment file"
        )
