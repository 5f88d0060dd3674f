"""Places for workers that join, and why a host may not take one."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from asyncrl.config.sections.device_pools import CPU, Device, DevicePool, Host


@dataclass(frozen=True, slots=True)
class Places:
    """The workers of one service that join. needed: places that have to be taken before the run begins, and of which
    one has to be taken again when all are lost. packages: whose versions have to agree. command: starts one. pool:
    whose hosts may join, with its devices; None: any host may that has the device. planned: the host of each replica,
    where the pool names some."""

    needed: int
    packages: Collection[str]
    command: str
    pool: DevicePool | None = None
    device: Device = CPU
    planned: Sequence[str] = ()

    def planned_host(self, replica: int) -> str:
        return self.planned[replica] if replica < len(self.planned) else ""

    def order(self, site: tuple[str, str]) -> tuple[int, tuple[str, str]]:
        """Returns by what hosts are ordered before ranks lie on them: as their pool names them, whoever came first.
        site: machine and name."""
        hosts = self.pool.hosts if self.pool is not None else ()
        return hosts.index(site[1]) if site[1] in hosts else len(hosts), site

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
