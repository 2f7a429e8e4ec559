"""Self-contained HTML pages: they need neither network nor scripts."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import words


def render(package: str, template: str, **values: Any) -> str:
    """Render a template of a package; it may include templates of this package."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(__package__)]),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"size": words.size, "duration": words.duration, "scientific": scientific}
    style = (files(__package__) / "templates" / "style.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(style=Markup(style), **values)


def scientific(number: float) -> Markup:
    """Format a number like `1.2·10⁻³`, as HTML."""
    digits, power = f"{number:.1e}".split("e")
    return Markup(f"{digits}&middot;10<sup>{int(power)}</sup>" if number else "0")
