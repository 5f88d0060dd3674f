"""Objects in a bucket, against a server that speaks the protocol of S3 (moto)."""

import importlib.util
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncrl.controller.journal.run_copy import OtherWriter, S3Objects
from asyncrl.errors import ConfigError

MISSING = [name for name in ("botocore", "moto") if importlib.util.find_spec(name) is None]
with_server = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
ADDRESS = "s3://bucket-of-runs/runs/a"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server that takes one put at a time: moto's threads would look at a condition and store in two steps, between
    which another put may come, while S3 and the stores that keep its conditions do both at once."""
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    one_at_a_time = threading.Lock()
    put_object = S3Response.put_object

    def put(response: Any) -> Any:
        with one_at_a_time:
            return put_object(response)

    patch = pytest.MonkeyPatch()
    patch.setattr(S3Response, "put_object", put)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
    patch.undo()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from botocore.session import get_session

    names = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**names, "ENDPOINT_URL": server}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    client = get_session().create_client("s3")
    client.create_bucket(Bucket="bucket-of-runs")
    yield
    for each in client.list_objects_v2(Bucket="bucket-of-runs").get("Contents", ()):
        client.delete_object(Bucket="bucket-of-runs", Key=each["Key"])
    client.delete_bucket(Bucket="bucket-of-runs")


@with_server
def test_objects_come_back_until_they_are_removed(bucket: None) -> None:
    objects = S3Objects(ADDRESS)
    objects.check()
    objects.put("objects/a", b"one")
    assert objects.get("objects/a") == b"one"
    objects.remove(["objects/a", "objects/never"])
    with pytest.raises(FileNotFoundError):
        objects.get("objects/a")
    assert S3Objects("s3://bucket-of-runs/runs/b").read_head() is None


@with_server
def test_objects_are_listed_and_removed_by_the_thousand_and_read_in_one_request(
    bucket: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = S3Objects(ADDRESS)
    made = list[str]()
    assert objects.names() == set()
    objects.put("objects/a", b"one")
    objects.put("objects/b", b"two")
    objects.write_head(b"head", "")
    assert objects.names() == {"objects/a", "objects/b"}, "the head is no part"
    objects._client.meta.events.register("before-send.s3", lambda request, **_: made.append(request.method))
    assert objects.get("objects/a") == b"one"
    assert objects.read_head() is not None
    assert made == ["GET", "GET"], "a head and its tag come in one reply"

    def refuse_the_last(**more: Any) -> dict[str, Any]:
        made.append("DELETE")
        return {"Errors": [{"Message": "Access Denied"}]} if len(more["Delete"]["Objects"]) < 1000 else {}

    monkeypatch.setattr(objects._client, "delete_objects", refuse_the_last)
    with pytest.raises(OSError, match="did not remove 1 objects: Access Denied"):
        objects.remove([f"objects/{number}" for number in range(2001)])
    assert made[2:] == ["DELETE"] * 3


class Broken:
    """The bytes of a reply that breaks off so many times."""

    left = 2

    def __init__(self, body: Any) -> None:
        self.body = body

    def read(self) -> bytes:
        from botocore.exceptions import IncompleteReadError

        if Broken.left:
            Broken.left -= 1
            raise IncompleteReadError(actual_bytes=1, expected_bytes=3)
        return self.body.read()


@with_server
def test_a_reply_that_breaks_off_is_fetched_again(bucket: None, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = S3Objects(ADDRESS)
    objects.put("objects/a", b"one")
    get = objects._client.get_object
    monkeypatch.setattr(objects._client, "get_object", lambda **more: (a := get(**more)) | {"Body": Broken(a["Body"])})
    assert objects.get("objects/a") == b"one"
    Broken.left = 3
    with pytest.raises(OSError, match="1 read, but total bytes expected is 3"):
        objects.get("objects/a")


@with_server
def test_a_head_is_exchanged_by_one_writer_only(bucket: None) -> None:
    objects = S3Objects(ADDRESS)
    assert objects.read_head() is None
    first = objects.write_head(b"first", "")
    with pytest.raises(OtherWriter, match="was written by another run"):
        objects.write_head(b"other", "")
    assert objects.read_head() == (b"first", first)
    second = objects.write_head(b"second", first)
    with pytest.raises(OtherWriter):
        objects.write_head(b"other", first)
    assert objects.write_head(b"second", first) == second, "a put whose reply was lost is sent again"

    def put(number: int) -> bool:
        try:
            S3Objects(ADDRESS).write_head(b"%d" % number, second)
        except OtherWriter:
            return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(put, range(6))) == 1


@with_server
def test_a_store_that_keeps_no_conditions_is_refused(bucket: None, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = S3Objects(ADDRESS)
    put = objects._client.put_object

    def careless(IfNoneMatch: str = "", **more: Any) -> Any:
        return put(**more)

    monkeypatch.setattr(objects._client, "put_object", careless)
    with pytest.raises(ConfigError, match="overwrites an object that a put with If-None-Match must not"):
        objects.check()


@with_server
def test_a_bucket_that_is_not_there_is_named_before_the_run(bucket: None) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written: .*bucket.*AWS_ACCESS_KEY_ID"):
        S3Objects("s3://another-bucket/run").check()


@with_server
def test_a_server_that_is_not_there_is_no_longer_waited_for_than_a_moment(
    bucket: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    found: list[BaseException] = []

    def read() -> None:
        try:
            S3Objects(ADDRESS).read_head()
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(30)
    assert "Could not connect" in str(found[0])


class Accepted(threading.Thread):
    """A server that reads a put piece by piece, as told, and answers when it is whole."""

    def __init__(self, whole: int) -> None:
        super().__init__(daemon=True)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.may_read = threading.Semaphore(0)
        self.has_read = threading.Semaphore(0)
        self.head = b""
        self._whole = whole

    def run(self) -> None:
        connection, _ = self.listening.accept()
        with connection, connection.makefile("rb") as file:
            while (line := file.readline()) != b"\r\n":
                self.head += line
            for _ in range(2):
                assert self.may_read.acquire(timeout=60)
                assert len(file.read(self._whole // 2)) == self._whole // 2
                self.has_read.release()
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "a"\r\nContent-Length: 0\r\n\r\n')


def test_bytes_of_a_part_move_before_the_whole_of_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("botocore")
    server = Accepted(64 << 20)
    server.start()
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.listening.getsockname()[1]}")
    objects = S3Objects(ADDRESS)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(objects.put, "objects/a", bytes(64 << 20))
        server.may_read.release()
        assert server.has_read.acquire(timeout=60)
        half = objects.blocks
        done = sent.done()
        server.may_read.release()
        sent.result(60)
    server.listening.close()
    assert not done
    assert half > 100, "and 64 of them are for the signature"
    assert objects.blocks > half + 100
    assert b"Expect" not in server.head, "no round trip before the bytes"


@pytest.mark.parametrize("wrong", ["s3://bucket", "s3://Bucket/run", "s3://b/run", "s3:///run", "s3://bucket/"])
def test_what_is_no_address_of_a_run_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="write s3://BUCKET/PATH"):
        S3Objects(wrong)
