"""All networks of the zoo, by name."""

from __future__ import annotations

import logging
from importlib import import_module

from tests.zoo.network import Network
from tests.zoo.run import Found, run

FAMILIES = "diffusers", "autoencoder", "monai", "transformers", "timm", "smp", "kornia", "neuralop"


def networks(words: list[str], families: list[str] | None = None) -> list[Network]:
    found = [one for family in families or FAMILIES for one in import_module(f"tests.zoo.{family}_networks").ZOO]
    return [one for one in found if not words or any(word in f"{one.package} {one.name}" for word in words)]


def run_named(package: str, name: str) -> list[Found]:
    logging.disable(logging.WARNING)
    (one,) = [one for one in networks([]) if (one.package, one.name) == (package, name)]
    try:
        return run(one)
    except Exception as error:  # it does not run in one process: the entry is wrong
        return [Found(package, name, (), (), refused=f"one process: {type(error).__name__}: {error}")]
