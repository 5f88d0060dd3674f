"""Who may speak on a TCP socket: holders of the run's own CURVE keys, on both ends."""

import asyncio
from dataclasses import dataclass
from typing import Any, Self

import zmq
from zmq.utils import z85

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"asyncrl"
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


class Gatekeeper:
    """Answers the context's authentication requests (ZAP, RFC 27): only the run's own key comes in.

    refused: how many strangers were turned away.
    """

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self.refused = 0
        self._allowed = keys.public.encode()
        self._socket: Any = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._answer_all)
        self._answer_all()

    def _answer_all(self) -> None:
        while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._answer(self._socket.recv_multipart(zmq.NOBLOCK))

    def _answer(self, request: list[bytes]) -> None:
        version, number, domain, _address, _identity, mechanism = request[: _REQUEST_FRAMES - 1]
        credentials = request[_REQUEST_FRAMES - 1 :]
        known = mechanism == b"CURVE" and domain == ZAP_DOMAIN and credentials == [z85.decode(self._allowed)]
        self.refused += not known
        status, text = (b"200", b"OK") if known else (b"400", b"not a key of this run")
        self._socket.send_multipart([version, number, status, text, b"", b""], zmq.NOBLOCK)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
