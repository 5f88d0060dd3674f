"""Objects in a bucket of S3, or of a server that speaks its protocol and keeps its conditions (extra `s3`)."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from asyncrl.config.install_hints import install_extra, program
from asyncrl.controller.journal.run_copy import PARTS, WAYS, OtherWriter
from asyncrl.errors import ConfigError

ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(\S*[^/\s])/?")
CONNECT_SECONDS = 10
READ_SECONDS = 60
TRIES = 3
"""Without a byte that moves."""
REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")
"""Codes with which S3 answers a put whose condition does not hold."""
HEAD = "head.json"
REMOVED_AT_ONCE = 1000
"""Names that S3 takes in one request to delete objects."""


class S3Objects:
    """Objects below an address s3://BUCKET/PATH. Keys, region and endpoint come from where every AWS client takes them:
    AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on, or ~/.aws. blocks: see Objects."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for a wrong address, and where the extra is missing."""
        if (found := ADDRESS.fullmatch(address)) is None:
            raise ConfigError(f"--run-dir: {address} is no address of a run; write s3://BUCKET/PATH")
        try:
            from botocore.config import Config
            from botocore.handlers import add_expect_header
            from botocore.session import get_session
        except ImportError as missing:
            raise ConfigError(f"--run-dir: {address} needs botocore; run: {install_extra('s3')}") from missing
        self.address = address.rstrip("/")
        self.blocks = 0
        self._bucket = found[1]
        self._path = found[2]
        limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": TRIES}}
        # The signature of a put holds its SHA-256, and the name of a part too: no further sums.
        sums = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        with self._translated():
            self._client = get_session().create_client("s3", config=Config(max_pool_connections=WAYS, **limits, **sums))
        # It would ask before each put whether the store takes it: a round trip for each part.
        self._client.meta.events.unregister("before-call.s3", add_expect_header)

    def check(self) -> None:
        """Raises ConfigError when the bucket cannot be written, or does not keep the condition of a put: then two runs
        could overwrite each other."""
        name = f"probe-{secrets.token_hex(8)}"
        try:
            self._put(name, b"1", IfNoneMatch="*")
        except OSError as error:
            raise ConfigError(
                f"--run-dir: {self.address} cannot be written: {error}. Look at the name of the bucket, "
                "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION and AWS_ENDPOINT_URL"
            ) from error
        try:
            self._put(name, b"2", IfNoneMatch="*")
        except OtherWriter:
            return
        finally:
            self.remove([name])
        raise ConfigError(
            f"--run-dir: {self.address} overwrites an object that a put with If-None-Match must not: two runs could "
            "destroy each other there. Take a store that keeps conditions, or a folder"
        )

    def put(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def get(self, name: str) -> bytes:
        return self._get(name)[0]

    def remove(self, names: list[str]) -> None:
        for first in range(0, len(names), REMOVED_AT_ONCE):
            keys = [{"Key": f"{self._path}/{name}"} for name in names[first : first + REMOVED_AT_ONCE]]
            with self._translated():
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            if failed := answer.get("Errors"):
                raise OSError(f"{self.address} did not remove {len(failed)} objects: {failed[0].get('Message')}")

    def names(self) -> set[str]:
        pages = self._client.get_paginator("list_objects_v2")
        with self._translated():
            listed = pages.paginate(Bucket=self._bucket, Prefix=f"{self._path}/{PARTS}").search("Contents[].Key")
            return {key.removeprefix(f"{self._path}/") for key in listed if key is not None}

    def read_head(self) -> tuple[bytes, str] | None:
        try:
            return self._get(HEAD)
        except FileNotFoundError:
            return None

    def write_head(self, data: bytes, after: str) -> str:
        condition = {"IfMatch": after} if after else {"IfNoneMatch": "*"}
        try:
            return self._put(HEAD, data, **condition)
        except OtherWriter:
            if (found := self.read_head()) is not None and found[0] == data:
                return found[1]  # The reply to our put was lost, and it was sent again.
            raise

    def _put(self, name: str, data: bytes, **condition: str) -> str:
        body = _Blocks(data, self)
        key = f"{self._path}/{name}"
        with self._translated():
            return str(self._client.put_object(Bucket=self._bucket, Key=key, Body=body, **condition)["ETag"])

    def _get(self, name: str) -> tuple[bytes, str]:
        """Returns an object and its tag. What breaks off in the middle is fetched again, which the client does not."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        for left in reversed(range(TRIES)):
            with self._translated():
                answer = self._client.get_object(Bucket=self._bucket, Key=f"{self._path}/{name}")
                try:
                    return answer["Body"].read(), str(answer["ETag"])
                except (HTTPClientError, IncompleteReadError):
                    if not left:
                        raise
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            if code in REFUSED:
                raise OtherWriter(
                    f"{self.address} was written by another run since this one read it: end that one, and go on with "
                    f"`{program()} run --run-dir {self.address}`"
                ) from error
            raise (FileNotFoundError if code == "NoSuchKey" else OSError)(str(error)) from error
        except BotoCoreError as error:
            raise OSError(str(error)) from error


class _Blocks(BytesIO):
    """The bytes of a put, which the client reads by blocks: each must move within CONNECT_SECONDS, not all of them."""

    def __init__(self, data: bytes, objects: S3Objects) -> None:
        super().__init__(data)
        self._objects = objects

    def read(self, size: int | None = -1) -> bytes:
        self._objects.blocks += 1
        return super().read(size)
