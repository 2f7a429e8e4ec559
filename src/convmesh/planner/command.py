"""The command `convmesh plan`."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..sharding.errors import ShardingError
from .plan import plan
from .problem import OPTIMIZERS, PRECISIONS, Mesh, PlanError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="module:Class or module:function that makes the model")
    parser.add_argument("--with", dest="arguments", nargs="*", default=[], metavar="NAME=VALUE", help="its arguments")
    parser.add_argument("--input", required=True, metavar="SIZES", help="the global shape, such as 1,1,512,512,512")
    parser.add_argument("--ranks", metavar="N", help="try the meshes of so many ranks and of fewer")
    parser.add_argument("--mesh", help="look at one mesh, such as d=4,h=2,w=2")
    parser.add_argument("--device", default="h100", help="a100, h100, h200, b200, mi300x, l40s, here, or a JSON file")
    parser.add_argument("--optimizer", default="adamw", help=", ".join(OPTIMIZERS))
    parser.add_argument("--precision", default="fp32", help=", ".join(PRECISIONS))
    parser.add_argument("--html", type=Path, default=Path("plan.html"), metavar="FILE", help="default: plan.html")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all tables there")


def run(options: argparse.Namespace) -> int:
    """Return the exit status: 0 if it fits, 1 if not, 2 with one line on what is wrong with what was asked for."""
    try:
        mesh = None if options.mesh is None else _mesh(options.mesh)
        model = _model(options.model, options.arguments)
        name, model = _by_name(model)
        found = plan(
            model, {name: _sizes(options.input)}, mesh,
            ranks=_ranks(options.ranks), device=options.device, optimizer=options.optimizer,
            precision=options.precision, progress=_progress,
        )  # fmt: skip
        _progress("")
        for path in filter(None, (options.html, options.json)):
            found.save(path)
    except PlanError as error:
        print(f"convmesh plan: {error}", file=sys.stderr)
        return 2
    except ShardingError as error:
        print(f"convmesh plan: {_in_one_line(error)}; the input was {options.input}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"convmesh plan: {error.filename} cannot be written ({error.strerror}): choose another", file=sys.stderr)
        return 2
    print(found, end="")
    print(f"\nThe page is {options.html}.")
    return 0 if found.fits else 1


def _in_one_line(error: ShardingError) -> str:
    """Join what is wrong, the remedy and the place, which have lines of their own."""
    first, *others = str(error).splitlines()
    return "; ".join([first, *(line.strip() for line in others if line.strip().startswith(("remedy:", "at ")))])


_INPUT = "input"


class _First(nn.Module):
    """A model whose first argument has no name."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.model(inputs[_INPUT])


def _by_name(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the name of a model's first argument, and a model that takes it by name."""
    try:
        first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    except (TypeError, ValueError):  # of one that is not written in Python
        first = None
    if first is None or first.kind is not first.POSITIONAL_OR_KEYWORD:
        return _INPUT, _First(model)
    return first.name, model


def _model(name: str, arguments: list[str]) -> nn.Module:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise PlanError(f"{name} names no model: write module:Class, such as convmesh.models:UNet")
    settings = dict(map(_setting, arguments))
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module beside where the command is called, as for `python -m`
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        said = _first_line(error)
        raise PlanError(f"{name} cannot be imported ({said}): check the name, and install its package") from None
    try:
        made = _built(make, settings)
    except (Exception, SystemExit) as error:
        said, how = _first_line(error), "--with NAME=VALUE, such as strides=2,2, or strides=2, with one entry"
        raise PlanError(f"{name} cannot be built ({said}): give its arguments by {how}") from None
    if not isinstance(made, nn.Module):
        raise PlanError(f"{name} makes a {type(made).__name__}: name something that makes an nn.Module")
    return made


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _built(make: Any, settings: dict[str, Any]) -> Any:
    """Build a model without values, so that it takes no memory, unless it looks at values while it is built."""
    try:
        with torch.device(_torch.DEVICE):
            return make(**settings)
    except (NotImplementedError, RuntimeError):
        return make(**settings)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise PlanError(f"{text!r} is no argument of a model: write NAME=VALUE, such as channels=16,32,64")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise PlanError(f"{text!r} is no shape: write its sizes, such as 1,1,512,512,512") from None


def _ranks(text: str | None) -> int | None:
    if text is not None and not text.lstrip("-").isdecimal():
        raise PlanError(f"{text!r} is no number of ranks: write one, such as 16")
    return None if text is None else int(text)


def _mesh(text: str) -> Mesh:
    try:
        pairs = [part.split("=") for part in text.split(",")]
        mesh = {name: int(size) for name, size in pairs}
    except ValueError:
        raise PlanError(f"{text!r} is no mesh: write its dimensions, such as d=4,h=2,w=2") from None
    if len(mesh) < len(pairs):
        raise PlanError(f"{text!r} names a mesh dimension twice: give each once")
    return mesh


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="\r", file=sys.stderr, flush=True)
