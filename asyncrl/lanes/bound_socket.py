"""Binds a socket to an address of a config."""

import socket

from asyncrl.errors import ConfigError


def on_tcp(host: str, port: int | str) -> str:
    """Returns tcp://HOST:PORT; the number of a host in IPv6 stands in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_of(address: str) -> str:
    """Returns the host in tcp://HOST:PORT, without brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def bound_socket(host: str, port: int, key: str) -> socket.socket:
    """Returns a socket that is bound to the address. Raises ConfigError, which names `key`, when it is taken or not of
    this machine."""
    bound = socket.socket(family_of(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)  # or asyncio leaves Nagle on
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(
            f"{key}: {host}:{port} cannot be listened at: {getattr(error, 'strerror', None) or error}; write another "
            "address, or port = 0 for a free one"
        ) from None
    return bound
