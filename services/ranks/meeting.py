"""Connects the ranks of a replica, which agree on whether they have their rows."""

from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar

import torch

from asyncrl.engines.training.ranks.rank_mesh import RankMesh, RankPlace, connect_beside, connect_mesh
from asyncrl.errors import LostRows
from asyncrl.fleet.worker.rank_meeting import MeetingPlace
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.rank_layout import Layout

Rows = TypeVar("Rows")


async def find_meeting(context: WorkerContext) -> MeetingPlace | None:
    """Waits until the controller has said where the ranks meet; returns None where there is one alone."""
    if context.spec.layout.size == 1:
        return None
    return await context.rank_meeting.place(context.config.fleet.start_deadline)


def open_mesh(context: WorkerContext, meeting: MeetingPlace | None, *, is_led: bool = False) -> RankMesh:
    """Connects the ranks, where there are several. is_led: rank 0 announces what all ranks compute."""
    if meeting is None:
        return RankMesh(service=context.spec.service)
    return connect_mesh(meeting, _place(context, is_led=is_led))


def open_mesh_beside(context: WorkerContext, meeting: MeetingPlace | None) -> RankMesh:
    """Connects the ranks of a replica whose processes have ranks of another service too. Rank 0 announces what all of
    them compute."""
    assert meeting is not None, "there are several ranks"
    sizes = context.config.generation.layout
    return connect_beside(meeting, replace(_place(context, is_led=True), layout=Layout(sizes.pp, sizes.tp)))


def _place(context: WorkerContext, *, is_led: bool) -> RankPlace:
    fleet = context.config.fleet
    return RankPlace(
        context.spec.rank,
        context.spec.layout,
        context.spec.device,
        waiting=context.occupancy.exchanging,
        start=fleet.start_deadline,
        exchange=fleet.call_deadline,
        has_own_gpu=bool(context.spec.devices),
        zero=context.config.training.zero_stage if context.spec.service == "training" else 0,
        service=context.spec.service,
        is_led=is_led,
    )


def warn_of_whole_load(context: WorkerContext, reason: str) -> None:
    """Logs at rank 0 why ranks that take parts of a model loaded all of it, if they did."""
    if reason and context.spec.rank == 0:
        context.log.warning("each rank loaded the whole model to take its part", reason=reason)


def agree_on_lost_rows(mesh: RankMesh, own: LostRows | None) -> LostRows | None:
    """Returns on all ranks an error that names what any of them lost, because the caller sees that of one rank; None
    where none lost rows. own: what this rank lost."""
    if not mesh.everyone.largest(torch.tensor([float(own is not None)])).item():
        return None
    named = mesh.everyone.told_by_each([] if own is None else [[owner, slot] for owner, slot in own.places])
    unique = dict.fromkeys((owner, slot) for places in named for owner, slot in places)
    return LostRows(str(own or f"another rank of the {mesh.service} lost rows of its share"), unique)


async def agreed(context: WorkerContext, mesh: RankMesh, reading: Awaitable[Rows]) -> Rows:
    """Returns what this rank reads. Raises LostRows, on all ranks, when one of them lost rows."""
    if mesh.size == 1:
        return await reading
    lost: LostRows | None = None
    try:
        found = await reading
    except LostRows as own:
        lost = own
    if (lost := await context.compute.run(agree_on_lost_rows, mesh, lost)) is not None:
        raise lost
    return found
