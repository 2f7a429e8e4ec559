"""Running a notebook without Jupyter: its code cells one after the other, and what a reader sees of them.

`python -m tests.notebooks examples/sixteen_ranks.ipynb` writes that into the file.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(path: Path) -> dict[str, Any]:
    """The notebook, with new outputs."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed, value = _run(ast.parse("".join(cell["source"])), f"{path.name}, cell {count}", names)
        cell["execution_count"] = count
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": printed}] if printed else []
        if value is not None:
            drawn = {"image/svg+xml": value._repr_svg_()} if hasattr(value, "_repr_svg_") else {}
            data = {**drawn, "text/plain": repr(value)}
            shown = {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data}
            cell["outputs"].append(shown)
    return notebook


def _run(tree: ast.Module, name: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line, if that is an expression."""
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), names)
    return printed.getvalue(), value


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(json.dumps(run(file), indent=1, ensure_ascii=False) + "\n")
