"""Runs the ranks of a layout as processes of this machine, on CPUs with one thread each.

They are forked from a process that has run no operation of torch: models are written by a child too.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers.utils import logging

from asyncrl.bench.end_to_end.benchmark_model import write_model
from asyncrl.bench.end_to_end.picture_rows import write_picture_model
from asyncrl.engines.pictures.prompt_pictures import WITH_PICTURES
from asyncrl.engines.training.ranks.rank_mesh import RankMesh, RankPlace, connect_mesh
from asyncrl.fleet.worker.rank_meeting import RankMeeting
from asyncrl.protocols.rank_layout import Layout

DEADLINE = 300
"""Seconds that writing a model, connecting, or an exchange between ranks may take."""
RankWork: TypeAlias = Callable[[RankMesh], Any]
"""Work of a rank with its mesh, which returns plain values."""


def write_in_child(model: Path, family: str = "llama", /, **sizes: int) -> Path:
    """Writes a model of a family. Raises RuntimeError when that fails or takes longer than DEADLINE."""
    logging.disable_progress_bar()  # transformers shows one for each file of a model that it writes.
    write, arguments = (write_picture_model, (model,)) if family in WITH_PICTURES else (write_model, (model, family))
    child = get_context("fork").Process(target=write, args=arguments, kwargs=sizes)
    child.start()
    child.join(DEADLINE)
    if child.exitcode != 0:
        child.kill()
        raise RuntimeError(f"the model was not written within {DEADLINE} s; exit code {child.exitcode}")
    return model


def run_ranks(layout: Layout, work: RankWork, seconds: float = DEADLINE, zero: int = 0) -> list[Any]:
    """Returns what each rank returned, in their order. zero: see RankMesh. Raises RuntimeError when a rank fails or
    takes longer than so many seconds."""
    fork, until = get_context("fork"), time.monotonic() + seconds
    pipes = [fork.Pipe() for _ in range(layout.size)]
    ranks = [
        fork.Process(target=_run_rank, args=(theirs, rank, layout, work, zero))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(ranks, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        address = _answer(pipes[0][0], until)
        for own, _ in pipes[1:]:
            own.send_bytes(address)
        return [json.loads(_answer(own, until)) for own, _ in pipes]
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
            process.join()


def _answer(own: Connection, until: float) -> bytes:
    try:
        if own.poll(max(0.0, until - time.monotonic())):
            return own.recv_bytes()
    except EOFError as error:
        raise RuntimeError("a rank failed: its error stands above") from error
    raise RuntimeError("a rank took too long")


def _run_rank(parent: Connection, rank: int, layout: Layout, work: RankWork, zero: int) -> None:
    torch.set_num_threads(1)
    meeting = RankMeeting()
    parent.send_bytes(meeting.take("").encode()) if rank == 0 else meeting.take(parent.recv_bytes().decode())
    mesh = RankMesh()
    if layout.size > 1:
        place = RankPlace(rank, layout, "cpu", nullcontext, DEADLINE, DEADLINE, zero=zero)
        mesh = connect_mesh(asyncio.run(meeting.place(DEADLINE)), place)
    parent.send_bytes(json.dumps(work(mesh)).encode())
