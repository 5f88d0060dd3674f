"""Opens the TCP store through which the ranks of a trainer find each other, and chooses the network that they use.

Neither the store nor what ranks exchange is encrypted: torch.distributed has no such thing. Between hosts it needs a
network that nobody else uses.
"""

import array
import fcntl
import os
import socket
import struct
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from asyncrl.fleet.worker.rank_meeting import MeetingPlace

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which gloo and NCCL learn which network interface to use."""
LOOPBACK = ("lo", "lo0")
SIOCGIFADDR = 0x8915
"""Request of ioctl(2) for the address of an interface (netdevice(7)); Linux only."""


def open_store(place: MeetingPlace, seconds: float) -> Store:
    """Serves the store at the rank that listens, connects to it at the others. seconds: that this may take. Raises
    RuntimeError when the store cannot be reached."""
    use_network_of(place.own_host)
    wait = timedelta(seconds=seconds)
    if place.listener is None:
        store = TCPStore(place.host, place.port, None, False, wait, wait_for_workers=False)
    else:
        descriptor = place.listener.detach()  # The store closes it.
        store = TCPStore(place.host, place.port, None, True, wait, wait_for_workers=False, master_listen_fd=descriptor)
    return PrefixStore(place.name, store)


def open_line(place: MeetingPlace, seconds: float) -> Store:
    """Connects to the store once more. Raises RuntimeError when it cannot be reached."""
    wait = timedelta(seconds=seconds)
    return PrefixStore(place.name, TCPStore(place.host, place.port, None, False, wait, wait_for_workers=False))


def use_network_of(host: str) -> None:
    """Has gloo and NCCL use the interface with this address, unless the user chose one. Workers start with loopback
    alone, because torch.distributed would listen where the host's name leads."""
    interface = interface_of(host)
    for name in INTERFACES:
        if interface and os.environ.get(name, LOOPBACK[0]) in LOOPBACK:
            os.environ[name] = interface


def interface_of(host: str) -> str:
    """Returns the network interface that has the address of a host; "" when none of this machine has."""
    wanted = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(asked, SIOCGIFADDR, request)
            except OSError:
                continue  # It has no IPv4 address.
            if socket.inet_ntoa(request.tobytes()[20:24]) == wanted:
                return name
    return ""
