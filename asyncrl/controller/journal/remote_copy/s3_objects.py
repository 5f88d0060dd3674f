"""Objects in a bucket of S3, or of a server that speaks its protocol and keeps its conditions (extra `s3`)."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asyncrl.config.install_hints import install_extra, program
from asyncrl.controller.journal.remote_copy.objects import PARTS, OtherWriter
from asyncrl.controller.journal.remote_copy.run_copy import WAYS
from asyncrl.errors import ConfigError

ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(\S*[^/\s])/?")
CONNECT_SECONDS, READ_SECONDS, TRIES = 10, 60, 3
REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")
"""Codes with which S3 answers a put whose condition does not hold."""
HEAD = "head.json"
REMOVED_AT_ONCE = 1000
"""Names that S3 takes in one request to delete objects."""


class S3Objects:
    """Objects below an address s3://BUCKET/PATH. Keys, region and endpoint come from where every AWS client takes them:
    AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on, or ~/.aws."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for a wrong address, and where the extra is missing."""
        if (found := ADDRESS.fullmatch(address)) is None:
            raise ConfigError(f"--run-dir: {address} is no address of a run; write s3://BUCKET/PATH")
        try:
            import s3fs
        except ImportError as missing:
            raise ConfigError(f"--run-dir: {address} needs s3fs; run: {install_extra('s3')}") from missing
        self.address = address.rstrip("/")
        self._bucket = found[1]
        self._path = found[2]
        limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": TRIES}}
        limits["max_pool_connections"] = WAYS
        self._files = s3fs.S3FileSystem(config_kwargs=limits, skip_instance_cache=True, use_listings_cache=False)

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
        with self._translated():
            # In one request: with more at a time s3fs asks for the size first.
            data: bytes = self._files.cat_file(f"{self._bucket}/{self._path}/{name}", max_concurrency=1)
        return data

    def remove(self, names: list[str]) -> None:
        for first in range(0, len(names), REMOVED_AT_ONCE):
            keys = [{"Key": f"{self._path}/{name}"} for name in names[first : first + REMOVED_AT_ONCE]]
            with self._translated():
                answer = self._files.call_s3(
                    "delete_objects", Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True}
                )
            if failed := answer.get("Errors"):
                raise OSError(f"{self.address} did not remove {len(failed)} objects: {failed[0].get('Message')}")

    def names(self) -> set[str]:
        with self._translated():
            found = self._files.find(f"{self._bucket}/{self._path}/{PARTS}")
        return {path.removeprefix(f"{self._bucket}/{self._path}/") for path in found}

    def read_head(self) -> tuple[bytes, str] | None:
        """Returns tag and bytes of one version of the head: another one may take its place between both requests."""
        while True:
            try:
                tag = str(self._request("head_object", HEAD)["ETag"])
                data = self.get(HEAD)
                if self._request("head_object", HEAD)["ETag"] == tag:
                    return data, tag
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
        return str(self._request("put_object", name, Body=data, **condition)["ETag"])

    def _request(self, method: str, name: str, **more: Any) -> Any:
        with self._translated():
            return self._files.call_s3(method, Bucket=self._bucket, Key=f"{self._path}/{name}", **more)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError

        try:
            yield
        except OSError as error:
            response = getattr(error.__cause__, "response", {})
            if response.get("Error", {}).get("Code") in REFUSED or isinstance(error, FileExistsError):
                raise OtherWriter(
                    f"{self.address} was written by another run since this one read it: end that one, and go on with "
                    f"`{program()} run --run-dir {self.address}`"
                ) from error
            raise
        except BotoCoreError as error:
            raise OSError(str(error)) from error
