"""Facts that only one rank knows: all ranks of a mesh go by the same answer, and nobody waits who need not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from convmesh.comm.agreed_facts import agreed, asked_anew, of_first_rank
from tests.harness import Pool
from tests.launch import launch


def never() -> bool:
    raise AssertionError("nobody asks this rank")


def asked(mesh: DeviceMesh, odd: int | None) -> dict[str, object]:
    """One rank, or none, says no."""
    with asked_anew(f"one says no: {odd}"):
        me = dist.get_rank()
        alone = agreed("alone", never, mesh, together=False)
        with FakeTensorMode():
            traced = agreed("fact", never, mesh)
        first = agreed("fact", lambda: me != odd, mesh)
        again = agreed("fact", never, mesh), agreed("fact", never, mesh, together=False)
        outside = DeviceMesh("cpu", torch.tensor([1, 2]), _init_backend=False, _rank=me)
        there = agreed("fact", lambda: me != odd, outside)
        said = of_first_rank("words", lambda: f"of {me}", mesh)
        return {"alone": alone, "traced": traced, "first": first, "again": again, "there": there, "said": said}


@pytest.mark.parametrize("odd", [None, 0, 3])
def test_a_fact_holds_where_it_holds_on_all_ranks_of_the_mesh(pool: Pool, odd: int | None) -> None:
    for rank, told in enumerate(pool.run(asked, odd)):
        assert (told["alone"], told["traced"]) == (False, False)
        assert told["first"] == (odd is None)
        assert told["again"] == (odd is None,) * 2
        assert told["there"] == (rank in (1, 2))
        assert told["said"] == "of 0"


def test_groups_of_a_mesh_agree_each_for_itself(pool: Pool) -> None:
    assert pool.run(rows) == [True, True, False, False]


def rows(mesh: DeviceMesh) -> bool:
    row = DeviceMesh("cpu", mesh.mesh[mesh.get_local_rank(0)].clone(), _init_backend=False)
    with asked_anew("rows"):
        return agreed("row", lambda: dist.get_rank() != 2, row)


def of_several_meshes(mesh: DeviceMesh) -> tuple[bool, bool]:
    """Were they asked again, a quick rank would find the others' answers to the first question, and take them away."""
    flat = init_device_mesh("cpu", (4,))
    with asked_anew("several meshes"):
        return agreed("fact", lambda: True, flat), agreed("fact", never, mesh)


def test_ranks_are_asked_once_whatever_mesh_they_make(pool: Pool) -> None:
    assert pool.run(of_several_meshes, mesh=(2, 2)) == [(True, True)] * 4


def test_without_other_processes_a_rank_answers_for_itself() -> None:
    assert agreed("fact", lambda: True, None)
    assert not agreed("fact", lambda: False, None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        assert agreed("fact", lambda: True, mesh)
        assert not agreed("another", lambda: False, mesh)
    finally:
        dist.destroy_process_group()


def one_does_not_come(mesh: DeviceMesh) -> bool:
    return dist.get_rank() == 1 or agreed("fact", lambda: True, mesh)


def test_a_rank_that_does_not_come_is_an_error_after_the_time_out() -> None:
    waited, away = launch(one_does_not_come, mesh=(2,), names=("h",), group_seconds=2)
    assert away.result is True
    assert waited.error == "CommunicationError"
    assert "ranks 0, 1 have reported what they know about: fact" in waited.message
