"""Compositions of vmap, grad, jvp, vjp, jacfwd and jacrev over convolutions, and the same by loops.

At each level of vmap any subset of the operands is mapped, none of them as well: then the level maps something else.
`python -m tests.batching.compositions` tries all there are up to depth 3, with every subset at every level.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from convmesh import batching
from tests.batching.oracle import assert_same, loop_and_stack

Function = Callable[..., Tensor]
TRANSFORMS = ("vmap", "grad", "jvp", "vjp", "jacfwd", "jacrev")
SUBSETS = tuple(product((False, True), repeat=3))

# The operator, and the shapes of one sample's input, weight and bias.
CONVOLUTIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), ((2, 2, 4), (3, 2, 3), (3,))),
    "1d, no batch": (lambda x, w, b: F.conv1d(x, w, b), ((2, 4), (2, 2, 2), (2,))),
    "2d": (lambda x, w, b: F.conv2d(x, w, b, padding=(1, 0)), ((2, 2, 2, 3), (2, 2, 3, 2), (2,))),
    "2d, grouped": (lambda x, w, b: F.conv2d(x, w, b, groups=2), ((1, 2, 3, 2), (4, 1, 2, 2), (4,))),
    "2d, one of everything": (F.conv2d, ((1, 1, 1, 1), (1, 1, 1, 1), (1,))),
    "2d, no images": (F.conv2d, ((0, 2, 3, 3), (2, 2, 2, 2), (2,))),
    "1d, transposed": (lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2), ((2, 2, 3), (2, 2, 2), (2,))),
    # Without output padding, with which torch itself has no third derivatives.
    "2d, transposed, grouped": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=(1, 0), groups=2),
        ((1, 4, 2, 2), (4, 1, 3, 2), (2,)),
    ),
}


@dataclass(frozen=True)
class Level:
    """One transform: of vmap, which of input, weight and bias it maps; of a derivative, by which it is."""

    transform: str
    mapped: tuple[bool, ...] = (False, False, False)
    operand: int = 0

    @property
    def dims(self) -> tuple[int | None, ...]:
        return tuple(0 if each else None for each in self.mapped)

    def __str__(self) -> str:
        mapped = self.mapped if self.transform == "vmap" else [i == self.operand for i in range(3)]
        return f"{self.transform}({''.join(name for name, each in zip('xwb', mapped, strict=True) if each)})"


@dataclass(frozen=True)
class Composition:
    """The outermost transform comes first."""

    convolution: str
    levels: tuple[Level, ...]
    batches: tuple[int, ...]  # samples of each level, where it is one of vmap

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.levels))} {self.convolution}, {self.batches}"

    def operands(self) -> list[Tensor]:
        generator, made = torch.Generator().manual_seed(0), []
        for i, shape in enumerate(CONVOLUTIONS[self.convolution][1]):
            sizes = [n for level, n in zip(self.levels, self.batches, strict=True) if level.mapped[i]]
            made.append(torch.randn(*sizes, *shape, generator=generator, dtype=torch.float64))
        return made

    def function(self, looped: bool) -> Function:
        made = CONVOLUTIONS[self.convolution][0]
        for level, batch in zip(reversed(self.levels), reversed(self.batches), strict=True):
            made = _transformed(made, level, batch, looped)
        return made

    def check(self) -> None:
        operands = self.operands()
        assert_same(self.function(looped=False)(*operands), self.function(looped=True)(*operands))


def all_compositions(most: int = 3) -> Iterator[Composition]:
    """To the depth `most`: every order of transforms, with every subset of operands at every level of vmap."""
    rng = random.Random(0)
    for depth in range(1, most + 1):
        for names in product(TRANSFORMS, repeat=depth):
            for subsets in product(SUBSETS, repeat=names.count("vmap")):
                yield _composition(rng, names, iter(subsets), (1, 2, 2, 3))


def some_compositions(count: int, seed: int) -> Iterator[Composition]:
    """With levels of vmap that have no samples, too."""
    rng = random.Random(seed)
    for _ in range(count):
        names = rng.choices(TRANSFORMS, weights=(5, 1, 1, 1, 1, 1), k=rng.randint(1, 3))
        yield _composition(rng, names, iter(rng.choices(SUBSETS, k=len(names))), (0, 1, 2, 2, 3))


def _composition(
    rng: random.Random, names: Sequence[str], subsets: Iterator[tuple[bool, ...]], sizes: Sequence[int]
) -> Composition:
    levels = tuple(
        Level(name, next(subsets)) if name == "vmap" else Level(name, operand=rng.randrange(3)) for name in names
    )
    return Composition(rng.choice(list(CONVOLUTIONS)), levels, tuple(rng.choice(sizes) for _ in names))


def _transformed(function: Function, level: Level, batch: int, looped: bool) -> Function:
    """The transform by torch.func, or with a loop for every vmap; those of Jacobians are hidden in them."""

    def mapped(*args: Tensor) -> Tensor:
        dims, beside = (0, *level.dims), torch.ones(batch)  # what it maps if it maps no operand
        one = lambda _, *sample: function(*sample)  # noqa: E731
        return loop_and_stack(one, dims, beside, *args) if looped else vmap(one, dims)(beside, *args)

    def by_operand(*args: Tensor) -> Tensor:
        def of_one(value: Tensor) -> Tensor:
            return function(*args[: level.operand], value, *args[level.operand + 1 :])

        return DERIVATIVES[level.transform, looped](of_one, args[level.operand])

    return mapped if level.transform == "vmap" else by_operand


def _few(function: Function) -> Function:
    """A few numbers of what it gives, each of many; a Jacobian of it all would be large."""
    return lambda value: (y := function(value).sin()).sum(tuple(range(1, y.ndim)) if y.ndim else ())


def _basis(like: Tensor) -> Iterator[Tensor]:
    for index in range(like.numel()):
        yield torch.zeros_like(like).flatten().index_fill(0, torch.tensor(index), 1.0).view_as(like)


def _looped_jacrev(function: Function, value: Tensor) -> Tensor:
    y, pull = vjp(function, value)
    rows = [pull(direction)[0] for direction in _basis(y)]
    return torch.stack(rows).reshape(*y.shape, *value.shape) if rows else y.new_zeros(*y.shape, *value.shape)


def _looped_jacfwd(function: Function, value: Tensor) -> Tensor:
    columns = [jvp(function, (value,), (direction,))[1] for direction in _basis(value)]
    y = columns[0] if columns else function(value)
    return torch.stack(columns, -1).reshape(*y.shape, *value.shape) if columns else y.new_zeros(*y.shape, *value.shape)


def _pull(function: Function, value: Tensor) -> Tensor:
    y, pull = vjp(function, value)
    gradient: Tensor = pull(y.cos())[0]
    return gradient


DERIVATIVES: dict[tuple[str, bool], Callable[[Function, Tensor], Tensor]] = {
    **{("grad", looped): lambda f, v: grad(lambda v: f(v).sin().sum())(v) for looped in (False, True)},
    **{("jvp", looped): lambda f, v: jvp(f, (v,), (v.cos(),))[1] for looped in (False, True)},
    **{("vjp", looped): _pull for looped in (False, True)},
    ("jacfwd", False): lambda f, v: jacfwd(_few(f))(v),
    ("jacfwd", True): lambda f, v: _looped_jacfwd(_few(f), v),
    ("jacrev", False): lambda f, v: jacrev(_few(f))(v),
    ("jacrev", True): lambda f, v: _looped_jacrev(_few(f), v),
}


def failures(compositions: Sequence[Composition]) -> list[str]:
    found = []
    for each in track(compositions, description=f"{len(compositions)} compositions"):
        try:
            each.check()
        except Exception as error:
            found.append(f"{each}\n{type(error).__name__}: {error}")
            print(found[-1], file=sys.stderr)
    return found


def main() -> int:
    batching.install()
    wrong = failures([*all_compositions(), *some_compositions(2000, random.SystemRandom().randrange(10**9))])
    print(f"{len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
