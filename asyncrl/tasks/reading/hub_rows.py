"""Reads rows of data sets of the Hugging Face hub, whole or streamed, with the package datasets."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.reading.row_files import Rows, optional_module

FORM = "hub:NAME, hub:NAME#SPLIT or hub:NAME:CONFIG#SPLIT"
STREAMING = "streaming"
"""The option of datasets.load_dataset with which rows are read one after the other, without a download of all."""
NO_CONFIG = "Config name is missing"
"""Beginning of the error of `datasets` about a data set with several configurations."""


def hub_rows(spec: str, options: Mapping[str, Any]) -> Rows:
    """Loads `NAME[:CONFIG][#SPLIT]`; options except `size` and `seed` go to `datasets.load_dataset`. Of a streamed data
    set the first `size` rows are read. Raises TaskError when it cannot be loaded."""
    whole, _, split = spec.partition("#")
    name, _, config = whole.partition(":")
    if not name:
        raise TaskError(f'task.prompts: "hub:" names no data set; write {FORM}')
    arguments = {key: value for key, value in options.items() if key not in ("size", "seed")}
    if config and arguments.setdefault("name", config) != config:
        raise TaskError(f"task.prompts: hub:{whole} names the configuration {config}, task.options.name another one")
    datasets = optional_module("datasets", "hub")
    failures = (ValueError, OSError, RuntimeError, getattr(datasets, "DatasetsError", ValueError))
    try:
        rows = datasets.load_dataset(name, split=split or "train", **arguments)
        return list(islice(rows, options["size"])) if arguments.get(STREAMING) else rows
    except failures as error:
        text = " ".join(str(error).split())
        advice = f"; write hub:{name}:CONFIG{'#' if split else ''}{split}" if text.startswith(NO_CONFIG) else ""
        raise TaskError(f"task.prompts: hub:{whole} could not be loaded: {text}{advice}") from error
