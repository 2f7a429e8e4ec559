"""Random programs, and those that were once wrong, against one process."""

from __future__ import annotations

import pytest

from tests.harness import Pool
from tests.programs import MESHES, Leaf, Program, check, random_program

SEEDS = range(60)

FOUND = {
    "one group of one sample, where a rank has one pixel": Program(
        (4,), (Leaf("x", (1, 2, 7), (2,)), Leaf("w", (2,), ("R",)), Leaf("b", (2,), ("R",))),
        ("y = F.group_norm(x, 1, w, b)",),
    ),
    "channels that some ranks have none of": Program(
        (2, 2), (Leaf("x", (2, 1, 7, 3), (1, 3)),), ("y = F.interpolate(x, size=[2, 8], mode='nearest-exact')",)
    ),
    "a pending sum beside a dimension that is cut twice": Program(
        (2, 2), (Leaf("x", (3, 4, 9), ("R", "P")), Leaf("y", (3, 4, 9), (2, 2))), ("z = torch.maximum(x, y)",)
    ),
    "nothing, split": Program((2,), (Leaf("x", (0, 4, 3), (1,)),), ("y = x.split(1, 0)[0]",)),
    "nothing, squeezed": Program((3,), (Leaf("x", (0, 3, 1, 6), (0,)),), ("y = x.squeeze()",)),
    "nothing, with nothing to squeeze": Program(
        (2, 2), (Leaf("x", (2, 0, 3, 6), (1, 3)),), ("y = x * 1; p = y.squeeze(); p.neg_()", "z = x.squeeze((0, 2))")
    ),
    "a linear layer of nothing": Program(
        (2,), (Leaf("x", (1, 0, 7), ("P",)), Leaf("w", (3, 7), ("R",))), ("y = F.linear(x, w)",)
    ),
    "rows of which some ranks have no part": Program(
        (1, 4), (Leaf("x", (2, 2, 9), (0, 2)), Leaf("m", (2,), ("R", 0), "true")), ("y = x[m]",)
    ),
    "a sharded bias that is added once": Program(
        (4,),
        (Leaf("x", (3, 2, 3, 4), (3,)), Leaf("w", (3, 4), ("R",)), Leaf("b", (3,), (0,)), Leaf("p", (3,), ("P",))),
        ("y = F.linear(x, w, b)", "z = F.linear(x, w, p)", "v = F.conv1d(x[0].mT, w[:, :, None], b)"),
    ),
    "views that are made of others": Program(
        (2, 2), (Leaf("x", (2, 3, 7, 1), (3, "P")),), ("y = x[:, None, 0::2, :].squeeze()", "z = x.repeat(1, 2, 1, 1)")
    ),
}  # fmt: skip

EMPTY_PARTS = {
    "a convolution": Program(
        (3,), (Leaf("x", (1, 2, 3, 2), (0,)), Leaf("w", (2, 2, 3, 1), (2,))),
        ("y = F.conv2d(x, w, None, stride=2, padding=(2, 1), dilation=2)",),
    ),
    "norms": Program(
        (4,), (Leaf("x", (3, 4, 8, 9), (3,)), Leaf("w", (4,), ("R",))),
        ("y = F.pad(F.group_norm(x, 4, w), (1, 2))", "z = F.batch_norm(x, None, None, training=True)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_random_programs(pool: Pool, mesh: tuple[int, ...]) -> None:
    programs = [program for program in map(random_program, SEEDS) if program.mesh == mesh]
    modes = [("eager", "twice", "inference")[number % 3] for number in range(len(programs))]
    pool.run_cases(check, list(zip(programs, modes, strict=True)), mesh=mesh)


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_were_wrong(pool: Pool, name: str) -> None:
    program = FOUND[name]
    pool.run_cases(check, [(program, "eager"), (program, "inference")], mesh=program.mesh)


@pytest.mark.parametrize("name", EMPTY_PARTS)
def test_compiled_programs_where_a_rank_has_nothing(pool: Pool, name: str) -> None:
    """A rank's zeros depend on no gradient, and what it receives it does not use: all ranks must communicate alike."""
    pool.run(check, (EMPTY_PARTS[name], "compiled"), mesh=EMPTY_PARTS[name].mesh)
