"""Authentication on the sockets of a run. On `tcp://` the run's keys encrypt (CURVE, on both sides); on `ipc://`, which
no other user can read, callers send a password derived from them (PLAIN).

Either way an unknown peer gets no further than the handshake. Without it every process that can open the socket could
send message parts without end, all of which ZeroMQ keeps until the last one comes.
"""

import asyncio
import hmac
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Self

import zmq
from zmq.utils import z85

from asyncrl.errors import PeerLost
from asyncrl.lanes.control.wire import DRAIN_BUDGET

ENCRYPTED = "tcp://"
ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"asyncrl"
USER = b"asyncrl"
KEY_REFUSED = "does not accept our keys"
"""Part of the reason why a connection is lost that a listener refused in the handshake."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair in Z85. Without the secret key there is no connection.

    server: public key of the listeners that a caller trusts, where an address names none. admitted: public keys of the
    callers that a listener accepts. Both are the own one by default. admitted_at: other public keys for single
    addresses on TCP. admitted_now: returns those that are accepted besides, asked at each handshake and message.
    in_addresses: whether addresses of listeners on TCP name their public key.
    """

    public: str
    secret: str = field(repr=False)
    server: str = ""
    admitted: tuple[str, ...] = ()
    admitted_at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    admitted_now: Callable[[], Collection[str]] | None = field(default=None, compare=False, repr=False)
    in_addresses: bool = False

    @classmethod
    def fresh(cls) -> Self:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @property
    def password(self) -> bytes:
        return sha256(self.secret.encode()).hexdigest().encode()

    def set_up_caller(self, socket: zmq.Socket[Any], address: str) -> None:
        if address.startswith(ENCRYPTED):
            socket.curve_publickey = self.public.encode()
            socket.curve_secretkey = self.secret.encode()
            socket.curve_serverkey = (split_key(address)[1] or self.server or self.public).encode()
        else:
            socket.plain_username = USER
            socket.plain_password = self.password

    def domain_of(self, address: str) -> bytes:
        """Returns the name under which a listener at this address asks about its callers."""
        return domain_at(address) if address in self.admitted_at else ZAP_DOMAIN

    def set_up_listener(self, socket: zmq.Socket[Any], address: str) -> None:
        socket.zap_domain = self.domain_of(address)
        if address.startswith(ENCRYPTED):
            socket.curve_publickey = self.public.encode()
            socket.curve_secretkey = self.secret.encode()
            socket.curve_server = 1
        else:
            socket.plain_server = 1


def with_key(address: str, public: str) -> str:
    """Returns an address on TCP with the public key of who listens there, in hex behind "?"."""
    return f"{address}?{z85.decode(public.encode()).hex()}"


def split_key(address: str) -> tuple[str, str]:
    """Returns the address to connect to and the public key of its listener, "" where it names none. Raises PeerLost for
    a key that is none."""
    bare, mark, key = address.partition("?")
    if not mark:
        return bare, ""
    if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
        raise PeerLost(f"{bare} names no public key: {key!r:.80}")
    return bare, z85.encode(bytes.fromhex(key)).decode()


def domain_at(address: str) -> bytes:
    """Returns the name under which a listener with callers of its own asks about them."""
    return ZAP_DOMAIN + b" " + address.encode()


def _decoded(public: Iterable[str]) -> set[bytes]:
    return {z85.decode(each.encode()) for each in public}


class Authenticator:
    """Answers the context's authentication requests (ZAP, RFC 27); accepts only holders of admitted keys, whose public
    keys are on each of their messages then. refused: number of peers refused. narrowed: domains of which some callers
    may be connected that are admitted no more."""

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self.refused = 0
        self.narrowed = set() if keys.admitted_now is None else {ZAP_DOMAIN}
        self._admitted = {ZAP_DOMAIN: _decoded(keys.admitted or (keys.public,))}
        self._admitted |= {domain_at(address): _decoded(callers) for address, callers in keys.admitted_at.items()}
        self._admitted_now = keys.admitted_now
        self._password = keys.password
        self._socket: Any = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        self._loop = asyncio.get_running_loop()
        self._next_pass: asyncio.Handle | None = None
        self._loop.add_reader(self._socket.fileno(), self._answer_all)
        self._answer_all()

    def admit(self, domain: bytes, callers: Iterable[str]) -> None:
        """Replaces the callers of a domain."""
        admitted = _decoded(callers)
        if self._admitted.get(domain, set()) - admitted:
            self.narrowed.add(domain)
        self._admitted[domain] = admitted

    def admits(self, domain: bytes, user: str) -> bool:
        """Returns whether a peer that was accepted on TCP with this user id is admitted still."""
        return not user or self._is_admitted(domain, z85.decode(user.encode()))

    def _answer_all(self) -> None:
        """Answers a few requests in a row, so that a flood of them does not stall the loop."""
        for _ in range(DRAIN_BUDGET):
            if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                return
            self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
        self._next_pass = self._loop.call_soon(self._answer_all)

    def _answer(self, request: list[bytes]) -> None:
        version, number, domain, _address, _identity, mechanism, *credentials = request
        accepted = domain in self._admitted and self._has_keys(domain, mechanism, credentials)
        self.refused += not accepted
        status, text = (b"200", b"OK") if accepted else (b"400", b"not a key of this run")
        user = z85.encode(credentials[0]) if accepted and mechanism == b"CURVE" else b""
        self._socket.send_multipart([version, number, status, text, user, b""], zmq.NOBLOCK)

    def _has_keys(self, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> bool:
        if mechanism == b"CURVE":
            return len(credentials) == 1 and self._is_admitted(domain, credentials[0])
        user, password = credentials if mechanism == b"PLAIN" and len(credentials) == 2 else (b"", b"")
        return user == USER and hmac.compare_digest(password, self._password)

    def _is_admitted(self, domain: bytes, public: bytes) -> bool:
        if public in self._admitted[domain]:
            return True
        if self._admitted_now is None or domain != ZAP_DOMAIN:
            return False
        return z85.encode(public).decode() in self._admitted_now()

    def close(self) -> None:
        if self._next_pass is not None:
            self._next_pass.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
