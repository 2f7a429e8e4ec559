"""Small random programs on sharded tensors, and what one process makes of them.

An operator may be right on what a test gives it and wrong on what another operator leaves behind: parts of size 1 and
0, pending sums, strides that say nothing. A program is text, so that one that fails can be read, cut down and kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from tests.cases import local_shape, place
from tests.compare import assert_close
from tests.ops.strided import Lies

MESHES = [(2,), (3,), (4,), (2, 2), (1, 4)]
LARGER_MESHES = [(5,), (8,), (2, 3), (2, 2, 2), (1, 2, 4)]  # of simulated ranks
EMPTY = 0.1  # of all programs may have tensors without elements
MOST = 2000  # elements of any tensor
LARGEST = 1e3


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program begins with: numbers, `true` or false, or indices below a number; and where it lies."""

    name: str
    shape: tuple[int, ...]
    at: tuple[Any, ...]
    kind: str | int = "numbers"

    def values(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)) + len(self.shape))
        if self.kind == "numbers":
            return torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.kind == "true":
            return torch.rand(self.shape, generator=generator) > 0.4
        return torch.randint(int(self.kind), self.shape, generator=generator)


@dataclass(frozen=True)
class Program:
    mesh: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]  # each gives a value to a name, or writes into one

    def __repr__(self) -> str:
        return "\n".join([f"mesh {self.mesh}", *map(str, self.leaves), *self.lines])

    def function(self, mode: str) -> Callable[..., list[torch.Tensor]]:
        """Of the leaves, what every line made; copies of it in compiled code, which has random numbers of its own."""
        results = [line.split(" = ")[0] for line in self.lines]
        head = f"def run({', '.join(leaf.name for leaf in self.leaves)}):"
        copied = " * 1" if mode == "compiled" else ""
        tail = f"return [{', '.join(f'{name}{copied}' for name in results)}]"
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec("\n    ".join([head, *self.lines, tail]), names)
        function: Callable[..., list[torch.Tensor]] = names["run"]
        return function


class Writer:
    """Writes a program by running it in one process."""

    def __init__(self, seed: int, length: int, meshes: list[tuple[int, ...]], compiled: bool) -> None:
        self.random = random.Random(seed)
        self.mesh = self.random.choice(meshes)
        self.smallest = 0 if self.random.random() < EMPTY else 1
        self.leaves: list[Leaf] = []
        self.lines: list[str] = []
        self.values: dict[str, torch.Tensor] = {}
        space = [self.random.randint(1, 9) for _ in range(self.random.choice([1, 2, 2, 3]))]
        shape = [self.random.randint(1, 3), self.random.randint(1, 4), *space]
        if not self.smallest:
            shape[self.random.choice([0, *range(len(shape))])] = 0
        self.names = [self.leaf(shape) for _ in range(2)]
        # Compiled code has random numbers of its own, and `out=` is refused for parts of tensors, on one device too.
        operators = [one for one in OPERATORS if not compiled or one not in (drawing, into_out)]
        while len(self.lines) < length:
            self.add(self.random.choice(operators))

    def leaf(self, shape: Any, kind: str | int = "numbers") -> str:
        anywhere = [*range(len(shape)), *range(2, len(shape)), "R", *("P" for _ in shape[:1] if kind == "numbers")]
        at = tuple(self.random.choice(anywhere) for _ in self.mesh)
        leaf = Leaf(f"x{len(self.leaves)}", tuple(shape), at, kind)
        self.leaves.append(leaf)
        self.values[leaf.name] = leaf.values().requires_grad_(kind == "numbers")
        return leaf.name

    def any(self, fewest: int = 1, most: int = 6) -> tuple[str, torch.Tensor]:
        """One of the latest tensors with so many dimensions."""
        fitting = [name for name in self.names if fewest <= self.values[name].dim() <= most]
        name = self.random.choice(fitting[-4:])  # IndexError: there is none
        return name, self.values[name]

    def derive(self, value: torch.Tensor) -> None:
        """Some operators of nothing have no gradients, or none that are numbers."""
        leaves = [self.values[leaf.name] for leaf in self.leaves]
        found = gradients([value], [leaf for leaf in leaves if leaf.requires_grad], keep=True)
        assert all(one is None or one.isfinite().all() for one in found)

    def give_up(self) -> int:
        raise ValueError

    def dim(self, tensor: torch.Tensor) -> int:
        return self.random.randrange(tensor.dim())

    def add(self, operator: Callable[[Writer], str]) -> None:
        """One more line, if torch likes it and there are not too many numbers, small enough to be compared."""
        before = len(self.leaves)
        name = f"v{len(self.lines)}"
        try:
            text = operator(self).replace("@", name)
            line = text if text.startswith(name) else f"{name} = {text}"
            made: dict[str, Any] = {"torch": torch, "F": F, **self.values}
            exec(line, made)
            if not self.smallest:
                self.derive(made[name])
        except (RuntimeError, IndexError, ValueError, AssertionError, ZeroDivisionError):
            del self.leaves[before:]
            return
        value = made[name]
        fits = self.smallest <= value.numel() <= MOST and value.dim() <= 6 and bool(value.isfinite().all())
        if fits and (not value.numel() or value.abs().max() < LARGEST):
            self.lines.append(line)
            self.names.append(name)
            self.values[name] = value
        else:
            del self.leaves[before:]


def convolution(w: Writer) -> str:
    x, tensor = w.any(3, 5)
    space, kernel = tensor.dim() - 2, [w.random.choice([1, 2, 3, 4]) for _ in tensor.shape[2:]]
    channels, groups = tensor.shape[1] or w.give_up(), w.random.choice([1, 1, tensor.shape[1]])  # 0 are refused
    transposed = w.random.random() < 0.3
    weight = w.leaf([channels, 2, *kernel] if transposed else [2 * groups, channels // groups, *kernel])
    numbers = f"stride={w.random.randint(1, 3)}, padding={w.random.randint(0, 2)}, groups={groups}"
    return f"F.conv{'_transpose' if transposed else ''}{space}d({x}, {weight}, None, {numbers}) / 3"


def pooling(w: Writer) -> str:
    x, tensor = w.any(3, 5)
    size, step = w.random.randint(1, 3), w.random.randint(1, 3)
    kind = w.random.choice(["max_pool", "avg_pool"])
    if w.random.random() < 0.3:
        return f"F.adaptive_{kind}{tensor.dim() - 2}d({x}, {size})"
    return f"F.{kind}{tensor.dim() - 2}d({x}, {size}, {step}, {w.random.choice([0, size // 2])})"


def normalisation(w: Writer) -> str:
    x, tensor = w.any(3, 5)
    rest = list(tensor.shape[w.random.randint(1, tensor.dim() - 1) :])
    channels = tensor.shape[1]
    groups = w.random.choice([number for number in range(1, channels + 1) if channels % number == 0])
    by_group = f"F.group_norm({x}, {groups}, {w.leaf([channels])}, {w.leaf([channels])})"
    return w.random.choice([
        by_group, by_group, f"F.batch_norm({x}, None, None, training=True)", f"F.instance_norm({x}, eps=0.1)",
        f"F.layer_norm({x}, {rest}, eps=0.1)", f"F.rms_norm({x}, {rest}, eps=0.1)",
    ])  # fmt: skip


def resampling(w: Writer) -> str:
    x, tensor = w.any(3, 5)
    linear = ("linear", "bilinear", "trilinear")[tensor.dim() - 3]
    mode = w.random.choice(["nearest", "nearest-exact", "area", linear])
    size = [w.random.randint(1, 9) for _ in tensor.shape[2:]]
    return f"F.interpolate({x}, size={size}, mode={mode!r})"


def padding(w: Writer) -> str:
    x, tensor = w.any(3, 5)
    mode = w.random.choice(["constant", "reflect", "replicate", "circular"])
    return f"F.pad({x}, {[w.random.randint(0, 2) for _ in range(2 * tensor.dim() - 4)]}, mode={mode!r})"


def part(w: Writer) -> str:
    x, tensor = w.any()
    kept = [w.random.choice([":", ":", f"{w.random.randint(-2, 3)}:", "::2", "None", "-1"]) for _ in tensor.shape]
    return f"{x}[{', '.join(kept)}]"


def joining(w: Writer) -> str:
    x, tensor = w.any()
    y = w.random.choice([name for name in w.names if w.values[name].dim() == tensor.dim()])
    return f"torch.{w.random.choice(['cat', 'stack'])}([{x}, {y}], {w.dim(tensor)})"


def turning(w: Writer) -> str:
    x, tensor = w.any()
    dim = w.dim(tensor)
    return w.random.choice([f"{x}.flip({dim})", f"{x}.roll({w.random.randint(-9, 9)}, {dim})"])


def viewing(w: Writer) -> str:
    x, tensor = w.any()
    order = w.random.sample(range(tensor.dim()), tensor.dim())
    sizes = w.random.sample(list(tensor.shape), tensor.dim())
    start = w.dim(tensor)
    return w.random.choice([
        f"{x}.permute({order})", f"{x}.reshape({sizes})", f"{x}.flatten({start})", f"{x}.unsqueeze({start})",
        f"{x}.squeeze()", f"{x}.transpose({start}, {w.dim(tensor)})",
    ])  # fmt: skip


def product(w: Writer) -> str:
    x, tensor = w.any(2, 4)
    return f"F.linear({x}, {w.leaf([3, tensor.shape[-1]])}, {w.leaf([3])}) / 3"


def elementwise(w: Writer) -> str:
    x, y = w.any()[0], w.any()[0]
    return w.random.choice([
        f"F.relu({x})", f"F.gelu({x})", f"{x} + {y}", f"{x} - 2 * {y}", f"{x} * {y}.tanh()", f"torch.maximum({x}, {y})",
        f"torch.where({x} > 0.1, {x}, {y})", f"{x}.clamp(-1, 0.5)", f"1 - {x}", f"{x}.detach() * {x}",
    ])  # fmt: skip


def reduction(w: Writer) -> str:
    x, tensor = w.any()
    dim = w.dim(tensor)
    return w.random.choice([
        f"{x}.sum({dim}, keepdim=True)", f"{x}.mean({dim})", f"{x}.amax({dim}, keepdim=True)", f"{x}.mean()",
        f"{x}.var({dim}, correction=0)", f"{x}.softmax({dim})", f"{x}.cumsum({dim})", f"{x}.logsumexp({dim})",
        f"{x}.max({dim})[0]", f"F.normalize({x}, dim={dim}, eps=0.1)",
    ])  # fmt: skip


def loss(w: Writer) -> str:
    x, tensor = w.any()
    name = w.random.choice(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
    return f"F.{name}({x}, {w.leaf(tensor.shape)}, reduction={w.random.choice(['mean', 'sum', 'none'])!r})"


def indexing(w: Writer) -> str:
    x, tensor = w.any()
    dim = w.dim(tensor)
    size = tensor.shape[dim]
    shape = [3 if other == dim else length for other, length in enumerate(tensor.shape)]
    return w.random.choice([
        f"{x}.index_select({dim}, {w.leaf([3], size)})", f"{x}.gather({dim}, {w.leaf(shape, size)})",
        f"{x}[{':, ' * dim}{w.leaf([2, 2], size)}]", f"{x}.chunk(2, {dim})[0]", f"{x}.sort({dim})[0]",
        f"{x}.index_add({dim}, {w.leaf([3], size)}, {w.leaf(shape)})",
    ])  # fmt: skip


def writing(w: Writer) -> str:
    x, tensor = w.any()
    first = ":, " * w.dim(tensor)
    then = [f"@[{first}1:] *= 2", f"@[{first}0] = {x}.mean()", f"@[{first}1:].add_({x}[{first}:-1])", "@.relu_()"]
    return f"@ = {x} * 1; {w.random.choice(then)}"


def seen(w: Writer, tensor: torch.Tensor) -> str:
    """Something that may be a view of a tensor, or a copy: which, its strides decide."""
    one, other = w.dim(tensor), w.dim(tensor)
    order = w.random.sample(range(tensor.dim()), tensor.dim())
    return w.random.choice([
        f"[{':, ' * one}1:]", f"[{':, ' * one}::2]", f".transpose({one}, {other})", f".permute({order})",
        ".contiguous()", f".flatten({one})", ".reshape(-1)", f".chunk(2, {one})[-1]", f".narrow({one}, 0, 1)",
        f".select({one}, 0)", f".unsqueeze({one})", ".squeeze()", f".diagonal(0, {one}, {other})",
        f".unflatten({one}, (1, -1))", f".movedim({one}, {other})",
    ])  # fmt: skip


def aliasing(w: Writer) -> str:
    """Write into what may be a view, or a copy, and look at both."""
    x, tensor = w.any()
    chain, part = "", tensor.detach() * 1
    for _ in range(w.random.randint(1, 4)):
        step = seen(w, part)
        chain, part = chain + step, eval(f"part{step}")
    write = w.random.choice(["mul_(2)", "relu_()", "add_(1)", "neg_()", "fill_(0.5)"])
    return f"@ = {x} * 1; p = @{chain}; p.{write}; @ = torch.cat([@.flatten(), p.flatten()])"


def reading(w: Writer) -> str:
    """Take what may be views, or copies, write into one of them or into the origin, and read all of them."""
    x, tensor = w.any()
    names, lines = ["@"], [f"@ = {x} * 1"]
    parts = [tensor.detach() * 1]
    for number in range(w.random.randint(1, 3)):
        at = w.random.randrange(len(parts))
        step = seen(w, parts[at])
        parts.append(eval(f"part{step}", {"part": parts[at]}))
        names.append(f"p{number}")
        lines.append(f"p{number} = {names[at]}{step}")
    for _ in range(w.random.randint(1, 3)):
        write = w.random.choice(["mul_(2)", "add_(1)", "neg_()", "sub_(0.5)"])  # none of which saves what it writes
        lines.append(f"{w.random.choice(names)}.{write}")
    return "; ".join([*lines, f"@ = torch.cat([{', '.join(f'{name}.flatten()' for name in names)}])"])


def drawing(w: Writer) -> str:
    """Random numbers, which are drawn in the order of memory."""
    x, tensor = w.any()
    x += "".join(seen(w, tensor) for _ in range(w.random.randint(0, 1)))
    drawn = w.random.choice([
        f"F.dropout({x}, 0.5)", f"torch.rand_like({x}) * {x}", f"{x} + torch.randn_like({x})",
        f"torch.bernoulli({x}.sigmoid())", f"({x} * 1).uniform_()", f"F.dropout(F.gelu({x}), 0.3)",
    ])  # fmt: skip
    return f"(torch.manual_seed({w.random.randrange(99)}), {drawn})[1]"


def into_out(w: Writer) -> str:
    """Results that are written into a part of a tensor, or of a turned one. torch has no gradients of that."""
    x, tensor = w.any()
    part, dim = "".join(seen(w, tensor) for _ in range(w.random.randint(0, 1))), w.dim(tensor)
    computed = w.random.choice([
        f"torch.add(y{part}, 1, out=@{part})", f"torch.mul(y{part}, y{part}, out=@{part})",
        f"torch.cumsum(y, {dim}, out=@)", "torch.cat([y[1:], y[:1]], out=@)", "torch.sort(y, out=(@, y.long()))",
        f"torch.sub(@{part}, y{part}, out=@{part})", f"torch.amax(y, {dim}, True, out=@.narrow({dim}, 0, 1))",
        f"torch.where(y{part} > 0, y{part}, -y{part}, out=@{part})", f"torch.sum(y, {dim}, out=@.select({dim}, 0))",
    ])  # fmt: skip
    return f"@ = torch.zeros_like({x}); y = {x}.detach(); {computed}"


def promoting(w: Writer) -> str:
    """Numbers of several kinds beside each other."""
    x, y = w.any()[0], w.any()[0]
    return w.random.choice([
        f"({x} > 0) * {y}", f"({x} * 4).long() + {y}", f"(({x} * 4).int() // 3).to(torch.float64) * {y}",
        f"(({x} > 0) + ({y} > 0.3)).double()", f"torch.complex({x}, {x} + 1).abs()", f"({x} > 0).sum(0) * 0.5",
        f"torch.where({x} > 0, 1, {y})", f"({x} + 1j * {x}).real", f"({x} * 4).round().long().clamp(0, 3).double()",
    ])  # fmt: skip


def mapping(w: Writer) -> str:
    """`vmap` over a dimension, sharded or not."""
    x, tensor = w.any(2)
    dim = w.dim(tensor)
    function = w.random.choice([
        "t.relu() * t.mean()", "t.sum(0)", "t.softmax(-1)", "t.flip(0) + t", "t.cumsum(0)",
        "F.normalize(t, dim=0, eps=0.1)",
    ])  # fmt: skip
    return f"torch.func.vmap(lambda t: {function}, in_dims={dim}, out_dims={w.random.choice([0, dim])})({x})"


OPERATORS: list[Callable[[Writer], str]] = [
    convolution, convolution, pooling, normalisation, resampling, padding, part, joining, turning, viewing, viewing,
    product, elementwise, elementwise, reduction, reduction, loss, indexing, writing, aliasing, aliasing, reading,
    reading, drawing, drawing, into_out, promoting, mapping,
]  # fmt: skip


def random_program(
    seed: int, length: int = 6, meshes: list[tuple[int, ...]] = MESHES, compiled: bool = False
) -> Program:
    writer = Writer(seed, length, meshes, compiled)
    return Program(writer.mesh, tuple(writer.leaves), tuple(writer.lines))


def largest(values: torch.Tensor) -> float:
    """Of their absolute values, and 1."""
    return max([1.0, *values.detach().abs().flatten().tolist()])


def gradients(
    outputs: list[torch.Tensor],
    leaves: list[torch.Tensor],
    twice: bool = False,
    keep: bool = False,
    scales: Sequence[float] | None = None,
) -> list[Any]:
    """With those of their squares, if `twice`; and what they were derived from can be derived again, if `keep`.

    Each output is divided by its scale: the sine of a large number has its rounding error, as often as it is large.
    """
    scaled = zip(outputs, map(largest, outputs) if scales is None else scales, strict=True)
    heads = [(output / scale).sin().sum() for output, scale in scaled if output.requires_grad]
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    if not heads:
        return []
    found = list(torch.autograd.grad(heads, asked, allow_unused=True, create_graph=twice, retain_graph=keep or twice))
    squares = [one.square().sum() for one in found if one is not None and one.requires_grad] if twice else []
    return [*found, *torch.autograd.grad(squares, asked, allow_unused=True)] if squares else found


def check(mesh: DeviceMesh, case: tuple[Program, str]) -> None:
    """The program on the mesh, eager, compiled or in inference mode, against one process: all values and gradients,
    those of gradients too if `twice`."""
    program, mode = case
    function = program.function(mode)
    try:
        expected, wanted = _one_process(program, function, mode == "twice")
    except RuntimeError:  # not every operator can be derived twice, on one device either
        mode = "eager"
        expected, wanted = _one_process(program, function, False)
    with convmesh.enable():
        placed = [place(leaf.values(), mesh, leaf.at).requires_grad_(leaf.kind == "numbers") for leaf in program.leaves]
        with torch.inference_mode(mode == "inference"):
            torch._dynamo.reset()
            if mode == "compiled":
                function = torch.compile(function, fullgraph=True, backend="aot_eager")
            actual = function(*placed)
        scales = [largest(one) for one in expected]
        found = gradients(actual, placed, mode == "twice", scales=scales) if mode != "inference" else wanted
        for line, one, other in zip(program.lines, actual, expected, strict=True):
            assert Lies.of(one) == Lies.of(other), f"strides {one.stride()}, on one device {other.stride()}: {line}"
        for one, other in zip([*actual, *found], [*expected, *wanted], strict=True):
            _compare(one, other)


def _one_process(program: Program, function: Callable[..., Any], twice: bool) -> tuple[list[torch.Tensor], list[Any]]:
    dense = [leaf.values().requires_grad_(leaf.kind == "numbers") for leaf in program.leaves]
    expected = function(*dense)
    return expected, gradients(expected, dense, twice)


def _compare(actual: Any, expected: Any) -> None:
    if actual is None or expected is None:
        assert not any(value is not None and value.abs().sum() for value in (actual, expected))
        return
    if isinstance(actual, DTensor):
        assert actual.to_local().shape == local_shape(actual), f"{actual.to_local().shape} at {actual.placements}"
        actual = actual.detach().full_tensor()
    assert_close(actual, expected, largest(expected))
