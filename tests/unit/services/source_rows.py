"""Rows that the services under test read."""

from typing import Any

from asyncrl.fleet.worker.service import Service
from asyncrl.lanes.data.row_store import RowStore


def store_read_by(service: Service) -> RowStore:
    """Returns the store of the fixture's reader."""
    reader: Any = service.context.reader
    store: RowStore = reader.store
    return store
