"""docs/networks.md: what the zoo has found, as a page, which is its record, too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from tests.zoo.network import DOUBLE, SINGLE
from tests.zoo.registry import networks
from tests.zoo.run import Found

PACKAGES = {
    "diffusers": "diffusers", "MONAI": "monai", "transformers": "transformers", "timm": "timm",
    "segmentation_models_pytorch": "segmentation_models_pytorch", "kornia": "kornia",
    "neuraloperator": "neuraloperator",
}  # fmt: skip

ABOUT = """# Networks

`make zoo` runs networks of other packages, unmodified, in small configurations with random parameters, in float64, on
two layouts each: a forward pass, and a backward pass of a loss of all results. It compares results and all gradients
with one process, and measures what ranks make and receive. It writes this page, with every entry of `tests/zoo` that
it has run. These are one step each: the page says nothing about long trainings.
"""
BEHIND = """
`make test` trains some of these networks on real processes (`tests/test_networks.py`). `convmesh.models` has ConvNeXt,
ResNet and U-Net in plain PyTorch; they are tested on meshes in `tests/models`.

## Methods that are not `forward`

After `distribute` every way into a model works: `vae.encode(x)`, `vae.decode(z)`, `model.generate(...)`, a submodule
called by itself, `torch.func.functional_call`. Gradients are summed, and constants are allowed, as in `forward`. So it
is in methods of an object that the model returns: `vae.encode(x).latent_dist.sample()` draws the numbers of one
device.

Code around a network that mixes plain tensors and DTensors, such as MONAI's
`sliding_window_inference`, runs within [`implicit_replication(mesh)`](api.md#convmesh.implicit_replication).

## How to read the tables

Differences are relative to the largest number of a tensor. Right is below 1e-7; of those marked *float32*, which round
to it somewhere inside whatever they are given, below 1e-4. `largest` is the largest tensor that any rank makes, and
`received` the most that reaches a rank at once, both relative to the largest activation of one process; parameters and
their gradients do not count. A network is *sharded* if no rank makes a tensor as large as that, nor receives 0.75
of one at once. Keys and values of attention would be [gathered](operators.md) in configurations this small; for this
page they go round, and random numbers, which are drawn in blocks of 1 MiB, are drawn in smaller ones. Ranks are
[simulated](simulate.md).
"""


def page(results: Sequence[Found]) -> str:
    return "\n".join([ABOUT, *_summary(results), BEHIND.strip(), "", *_tables(results)])


def read(text: str) -> list[Found]:
    """What a page was made of, as far as it says."""
    found, package = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            package = line[3:]
        elif line.startswith("| `"):
            found.append(_found(package, *(cell.strip() for cell in line.strip("|").split("|"))))
    return found


def _found(package: str, name: str, where: str, state: str, error: str, largest: str, received: str) -> Found:
    mesh, dims = (tuple(map(int, re.findall(r"\d+", numbers))) for numbers in where.split(",", 1))
    found = Found(package, name.strip("`"), mesh, dims)
    if state == "refused":
        found.refused = error
    else:
        found.tolerance = SINGLE if "float32" in state else DOUBLE
        found.error, found.largest, found.received = float(error), float(largest), float(received)
    return found


def _summary(results: Sequence[Found]) -> Iterator[str]:
    names, entries = {(one.package, one.name) for one in results}, networks([])
    run = f"All {len(names)} entries" if len(names) == len(entries) else f"{len(names)} of the {len(entries)} entries"
    right, sharded = sum(one.right for one in results), sum(one.sharded for one in results)
    yield (
        f"{run}, on {len(results)} layouts: {right} were right, {sharded} of these sharded throughout "
        f"({100 * sharded / max(1, len(results)):.1f} %).\n"
    )
    yield "| package | version | networks | layouts | right | sharded |"
    yield "|---|---|---|---|---|---|"
    yield f"| torch | {version('torch')} | | | | |"
    for package, distribution in PACKAGES.items():
        if own := [one for one in results if one.package == package]:
            counts = len({one.name for one in own}), len(own), sum(one.right for one in own)
            cells = _version(distribution), *counts, sum(one.sharded for one in own)
            yield f"| {package} | {' | '.join(map(str, cells))} |"
    yield ""
    reasons = {(one.package, one.name): one.replicated for one in entries}
    if rest := sorted({(one.package, one.name) for one in results if not one.sharded}):
        yield "Not sharded throughout, on one layout or both:\n"
        for package, name in rest:
            yield f"- {package}'s `{name}`: {reasons.get((package, name)) or 'not understood yet'}."
        yield ""


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "-"


def _tables(results: Sequence[Found]) -> Iterator[str]:
    for package in PACKAGES:
        if rows := sorted((one for one in results if one.package == package), key=lambda one: one.name):
            yield f"## {package}\n"
            yield "| network | mesh, dimensions | | greatest difference | largest | received |"
            yield "|---|---|---|---|---|---|"
            yield from map(_row, rows)
            yield ""


def _row(one: Found) -> str:
    where = f"{' x '.join(map(str, one.mesh))}, {', '.join(map(str, one.dims))}"
    if one.refused:
        return f"| `{one.name}` | {where} | refused | {_words(one.refused)} | | |"
    state = "sharded" if one.sharded else "right" if one.right else "**wrong**"
    state += " (float32)" if one.tolerance > DOUBLE else ""
    return f"| `{one.name}` | {where} | {state} | {one.error:.0e} | {one.largest:.2f} | {one.received:.2f} |"


def _words(text: str) -> str:
    """On one line, without what a table would take for its own."""
    return " ".join(text.split())[:120].replace("|", "/").replace("<", "(").replace(">", ")")
