"""The tests that `make check` runs: some of every package and every operator family, in a minute or two on 2 cores.

`python -m tests.tier` prints them as pytest takes them. A test belongs here if it is quick and finds much: others wait
for `make test`.
"""

from __future__ import annotations

# By package of convmesh, or module; paths below tests/.
TIER: dict[str, tuple[str, ...]] = {
    "_torch": ("sharding/test_switch.py",),
    "batching": ("batching/test_rules.py", "batching/test_registration.py", "batching/test_functorch.py"),
    "cli": ("test_cli.py", "test_tier.py"),
    "comm": ("comm/test_exchange.py", "comm/test_reduce.py", "comm/test_waiting.py"),
    "demo": ("test_demo.py::test_sizes_have_three_digits", "test_demo.py::test_pictures_lie_inside_the_package"),
    "geometry": ("geometry",),
    "kernels": ("kernels/test_backend.py", "kernels/test_library.py", "kernels/test_norms.py"),
    "models": ("models/test_models.py::test_shapes", "models/test_models.py::test_bad_arguments_say_what_is_allowed"),
    # The first has functions of every family, and says so itself.
    "ops": ("ops/test_families.py", "ops/test_strides.py", "ops/convolution/test_bad_input.py"),
    "sharding": ("sharding/test_fallback.py", "sharding/test_partial.py", "sharding/test_redistribute.py"),
    "training": ("training/test_distribute.py", "training/test_mistakes.py"),
}


def paths() -> list[str]:
    return [f"tests/{path}" for package in TIER.values() for path in package]


if __name__ == "__main__":
    print(*paths())
