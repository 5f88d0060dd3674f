"""Who may speak on a socket of a run: holders of its keys. On `tcp://` they encrypt (CURVE, on both ends); on `ipc://`,
which nothing can listen in on, callers show a password made from them (PLAIN).

Either way a stranger's bytes end in the handshake. Without it anyone who can open the socket could send the parts of a
message for ever, which ZeroMQ keeps until the last one comes.
"""

import asyncio
import hmac
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

import zmq
from zmq.utils import z85

from asyncrl.wire.ends import DRAIN_BUDGET

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"asyncrl"
USER = b"asyncrl"
_REQUEST_FRAMES = 7
"""version, request id, domain, address, identity, mechanism, credentials (RFC 27)."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One key pair for all processes of a run, in Z85. Who does not hold the secret one gets no connection."""

    public: str
    secret: str

    @classmethod
    def fresh(cls) -> Self:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"

    def _apply(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()

    def apply_to_client(self, socket: zmq.Socket[Any]) -> None:
        self._apply(socket)
        socket.curve_serverkey = self.public.encode()

    def apply_to_server(self, socket: zmq.Socket[Any]) -> None:
        self._apply(socket)
        socket.curve_server = 1
        socket.zap_domain = ZAP_DOMAIN

    @property
    def password(self) -> bytes:
        return sha256(self.secret.encode()).hexdigest().encode()

    def show_password(self, socket: zmq.Socket[Any]) -> None:
        """For the caller's end of an ipc:// socket."""
        socket.plain_username, socket.plain_password = USER, self.password

    def ask_password(self, socket: zmq.Socket[Any]) -> None:
        """For the listener's end of an ipc:// socket."""
        socket.plain_server = 1
        socket.zap_domain = ZAP_DOMAIN


class Gatekeeper:
    """Answers the context's authentication requests (ZAP, RFC 27): only who has the run's own keys comes in.

    refused: how many strangers were turned away.
    """

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self.refused = 0
        self._public, self._password = z85.decode(keys.public.encode()), keys.password
        self._socket: Any = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._loop.add_reader(self._socket.fileno(), self._answer_all)
        self._answer_all()

    def _answer_all(self) -> None:
        """A few in a row, so that strangers who knock without end do not keep the loop."""
        for _ in range(DRAIN_BUDGET):
            if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                return
            self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
        self._again = self._loop.call_soon(self._answer_all)

    def _answer(self, request: list[bytes]) -> None:
        version, number, domain, _address, _identity, mechanism = request[: _REQUEST_FRAMES - 1]
        known = domain == ZAP_DOMAIN and self._knows(mechanism, request[_REQUEST_FRAMES - 1 :])
        self.refused += not known
        status, text = (b"200", b"OK") if known else (b"400", b"not a key of this run")
        self._socket.send_multipart([version, number, status, text, b"", b""], zmq.NOBLOCK)

    def _knows(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if mechanism == b"CURVE":
            return credentials == [self._public]
        shown = credentials if mechanism == b"PLAIN" and len(credentials) == 2 else [b"", b""]
        return shown[0] == USER and hmac.compare_digest(shown[1], self._password)

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
