"""Bad arguments: the same clear error on every rank, before anything is sent; and the next call works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from tests.cases import place
from tests.compare import assert_close, same_on_all_ranks
from tests.harness import Pool


def call(mesh: DeviceMesh, **change: Any) -> torch.Tensor:
    """A convolution that is right but for what `change` says."""
    given: dict[str, Any] = {
        "input": (2, 4, 9, 11), "weight": (6, 4, 3, 3), "bias": (6,), "plain": (),
        "dtype": torch.float64, "weight_dtype": torch.float64,
        "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "transposed": False, "output_padding": (0, 0),
        "groups": 1,
    } | change  # fmt: skip
    x = place(torch.ones(given["input"]).to(given["dtype"]), mesh, (3,))
    w = place(torch.ones(given["weight"]).to(given["weight_dtype"]), mesh, ("R",))
    b = place(torch.ones(given["bias"]).to(given["dtype"]), mesh, ("R",))
    tensors = {"input": x, "weight": w, "bias": b}
    tensors |= {name: torch.ones(tensors[name].shape, dtype=torch.float64) for name in given["plain"]}
    geometry = (given[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups"))
    return torch.ops.aten.convolution(*tensors.values(), *geometry)


def failing(mesh: DeviceMesh, change: dict[str, Any]) -> tuple[str, str, int]:
    with convmesh.enable():
        with CommDebugMode() as sent:
            try:
                call(mesh, **change)
                message, kind = "no error", "none"
            except (ValueError, RuntimeError) as error:
                message, kind = str(error), type(error).__name__
        good = F.conv2d(
            place(torch.ones(2, 4, 9, 11), mesh, (3,)), place(torch.ones(6, 4, 3, 3), mesh, ("R",)), padding=1
        )
    assert_close(good.full_tensor(), F.conv2d(torch.ones(2, 4, 9, 11), torch.ones(6, 4, 3, 3), padding=1))
    return kind, message, sent.get_total_counts()


BAD = {
    "channels": ({"input": (2, 5, 9, 11)}, "input has 5 channels, and the weight takes 4"),
    "groups": ({"groups": 4, "weight": (6, 1, 3, 3)}, "`groups` (=4) must divide"),
    "no groups": ({"groups": 0}, "`groups` (=0) must divide"),
    "no inputs": ({"input": (2, 0, 9, 11), "weight": (6, 0, 3, 3)}, "there are no channels"),
    "no outputs": ({"weight": (0, 4, 3, 3), "bias": (0,)}, "there are no channels"),
    "bias": ({"bias": (5,)}, "the bias has shape (5,), and the output 6 channels"),
    "no output": ({"weight": (6, 4, 3, 99)}, "is too small"),
    "dimensions": ({"input": (2, 4, 11, 9, 7)}, "needs an input of as many"),
    "list lengths": ({"stride": (1, 1, 1)}, "take one number, or 2"),
    "stride": ({"stride": (0, 1)}, "must be positive"),
    "padding": ({"padding": (-1, 1)}, "paddings not negative"),
    "output padding": ({"transposed": True, "weight": (4, 6, 3, 3), "output_padding": (1, 1)}, "smaller than stride"),
    "dtypes": ({"weight_dtype": torch.float32}, "the dtypes differ"),
    "integers": ({"dtype": torch.int64, "weight_dtype": torch.int64}, "torch.int64 are not supported"),
    "plain weight": ({"plain": ("weight",)}, "plain torch.Tensor beside DTensors: weight"),
    "plain bias": ({"plain": ("bias",)}, "plain torch.Tensor beside DTensors: bias"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_alike_on_all_ranks_before_anything_is_sent(pool: Pool, name: str) -> None:
    change, expected = BAD[name]
    kind, message, sent = same_on_all_ranks(pool.run(failing, dict(change), mesh=(4,)))
    assert kind == ("PlainTensor" if name.startswith("plain") else "ShardingError")
    assert expected in message
    assert "remedy:" in message
    assert sent == 0


def other_mesh(mesh: DeviceMesh) -> list[str]:
    x = place(torch.ones(2, 4, 9, 11), mesh, (3, "R"))
    other = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("space",))
    told = []
    with convmesh.enable():
        for wrong in (
            lambda: F.conv2d(x, place(torch.ones(6, 4, 3, 3), other, ("R",))),
            lambda: x + place(torch.ones(11), other, (0,)),
        ):
            with pytest.raises(convmesh.ShardingError) as caught:
                wrong()
            told.append(str(caught.value))
    return told


def test_two_meshes(pool: Pool) -> None:
    convolution, sum = same_on_all_ranks(pool.run(other_mesh, mesh=(2, 2)))
    assert "weight is on another mesh than input" in convolution
    assert "operand 1 is on another mesh than operand 0" in sum
    assert all(name in sum for name in ("on a mesh of 2 x 2", "on a mesh of space 4", "remedy: put all of them on one"))


def out_of_order(mesh: DeviceMesh) -> str:
    x, w = place(torch.ones(2, 4, 9, 11), mesh, (3,)), place(torch.ones(6, 4, 3, 3), mesh, ("R",))
    with convmesh.enable(), pytest.raises(convmesh.ShardingError) as caught:
        F.conv2d(x, w)
    return str(caught.value)


def test_a_mesh_whose_groups_have_another_order(pool: Pool) -> None:
    message = same_on_all_ranks(pool.run(out_of_order, mesh=(3,), ranks=(2, 0, 3)))
    assert "ranks do not ascend" in message


def test_the_message_names_operator_shapes_placements_and_remedy(pool: Pool) -> None:
    change, _ = BAD["channels"]
    _, message, _ = pool.run(failing, dict(change), mesh=(2,))[0]
    assert message.startswith("convolution: ")
    for part in ("(2, 5, 9, 11) torch.float64", "Shard(dim=3)", "on a mesh of 2", "(6, 4, 3, 3)", "remedy: "):
        assert part in message
