"""The tests that `make check` runs: some of every package and every operator family, in a minute or two on 2 cores.

`python -m tests.tier` prints them as pytest takes them. A test belongs here if it is quick and finds much: others wait
for `make test`.
"""

from __future__ import annotations

# By package of convmesh, or module; paths below tests/.
TIER: dict[str, tuple[str, ...]] = {
    "_torch": ("sharding/test_switch.py",),
    "batching": (
        "batching/test_algorithms.py", "batching/test_choice.py", "batching/test_functorch.py",
        "batching/test_registration.py", "batching/test_rules.py", "batching/test_transforms.py",
    ),
    "cli": ("test_cli.py", "test_tier.py"),
    "comm": (
        "comm/shared_memory", "comm/test_agreed_facts.py", "comm/test_schedule.py", "comm/test_routed.py",
        "comm/test_reduce.py", "comm/test_waiting.py",
    ),
    "demo": ("test_demo.py::test_sizes_have_three_digits", "test_demo.py::test_pictures_lie_inside_the_package"),
    "geometry": ("geometry",),
    "kernels": (
        "kernels/test_backend.py", "kernels/test_library.py", "kernels/test_normalization.py", "kernels/test_norms.py",
        "kernels/test_pooling.py", "kernels/test_products.py", "kernels/test_weight_gradient.py",
    ),
    "models": ("models",),
    "ops": (
        "ops/test_families.py",  # a function of every family: it fails if no rule of one of them has run
        "ops/test_zero_gradients.py", "ops/convolution/test_bad_input.py", "ops/convolution/test_dilated.py",
        "ops/convolution/test_kernels.py", "ops/convolution/test_sweep.py", "ops/indexing/test_index_bounds.py",
        "ops/linalg/test_linear.py", "ops/normalization/test_norms.py", "ops/optimizers/test_foreach.py",
        "ops/pooling/test_max_unpool.py", "ops/random/test_partitioned_draw.py",
        "ops/resampling/test_shuffle_and_grid.py", "ops/shape/test_pad.py", "ops/shape/test_permute.py",
    ),
    "per_sample": ("per_sample/test_functions.py",),
    "planner": ("planner/test_plan.py", "planner/test_bad_input.py"),
    "report": ("report",),
    "selftest": ("selftest/test_report.py",),
    "sharding": ("sharding/test_fallback.py", "sharding/test_partial.py", "sharding/test_redistribute.py"),
    "simulation": (
        "simulation/test_ranks.py::test_results_are_in_the_order_of_ranks",
        "simulation/test_ranks.py::test_all_collectives",
    ),
    "training": ("training/test_distribute.py", "training/test_mistakes.py"),
}  # fmt: skip


def paths() -> list[str]:
    return [f"tests/{path}" for package in TIER.values() for path in package]


if __name__ == "__main__":
    print(*paths())
