"""Forks the ranks of a layout from a process that has run no operation of torch, and connects them."""

import asyncio
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from asyncrl.engines.ranks.rank_mesh import RankMesh, RankPlace, connect_mesh
from asyncrl.fleet.worker.rank_meeting import RankMeeting
from asyncrl.protocols.rank_layout import Layout

PATIENCE = 60.0


def run_ranks(layout: Layout, work: Callable[[RankMesh], None], patience: float = PATIENCE, **facts: Any) -> list[int]:
    """Does `work` at each rank; returns how the ranks ended, as `os.waitpid` says it. facts: of RankPlace. All draw the
    same numbers: ranks with random states of their own resume in their own layout only."""
    children = list[int]()
    pipes = [os.pipe() for _ in range(1, layout.size)]
    for rank in range(layout.size):
        if (child := os.fork()) == 0:
            torch.manual_seed(0)
            meeting = RankMeeting()
            address = meeting.take(os.read(pipes[rank - 1][0], 1000).decode() if rank else "")
            for _, told in [] if rank else pipes:
                os.write(told, address.encode())
            place = RankPlace(rank, layout, "cpu", nullcontext, patience, patience, **facts)
            work(connect_mesh(asyncio.run(meeting.place(patience)), place))
            os._exit(0)
        children.append(child)
    for end in (end for ends in pipes for end in ends):
        os.close(end)
    return [os.waitpid(child, 0)[1] for child in children]
