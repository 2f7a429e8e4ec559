"""What a line of a random program may do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.programs.program import MESHES, Program
from tests.programs.writer import Writer


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
    # Compiled code has random numbers of its own, and `out=` is refused for parts of tensors, on one device too.
    operators = [one for one in OPERATORS if not compiled or one not in (drawing, into_out)]
    writer = Writer(seed, length, meshes, operators)
    return Program(writer.mesh, tuple(writer.leaves), tuple(writer.lines))
