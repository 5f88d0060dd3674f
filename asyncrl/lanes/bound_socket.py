"""Binds a socket to an address of a config."""

import socket

from asyncrl.errors import ConfigError


def bound_socket(host: str, port: int, key: str) -> socket.socket:
    """Returns a socket that is bound to the address. Raises ConfigError, which names `key`, when it is taken or not of
    this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # or asyncio leaves Nagle on
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
