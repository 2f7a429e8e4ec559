"""Where the library asks what device or backend it is on: each place has a test that runs it on a CPU with gloo, as all
have, and one that runs it elsewhere. The list is to become shorter.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import convmesh

SOURCES = Path(convmesh.__file__).parent
TESTS = Path(__file__).parent
ASKS = re.compile(
    r"\b(?:device_type|device\.type|device)\s*(?:==|!=|in|not in)\s+[^|\n]*"
    r"(?:[\"']cpu[\"']|COMPILED_FOR|_AS_CPUS|DEVICE)"
    r"|\.is_cpu\b|\.is_cuda\b|get_backend\([^\n]*(?:==|!=)|cuda\.is_available|backend\(cpu\)\.name\(\)"
)
# By file: how often, and which test is on the other side.
KNOWN: dict[str, tuple[int, str]] = {
    "_torch/awaited.py": (1, "accelerator/test_training.py"),
    "_torch/collectives.py": (1, "accelerator/test_training.py"),
    "_torch/planning.py": (1, "planner/test_plan.py"),
    "batching/direct.py": (1, "accelerator/test_training.py"),
    "batching/machines.py": (1, "accelerator/test_training.py"),
    "comm/failures/interception.py": (1, "accelerator/test_training.py"),
    "comm/reduce.py": (1, "accelerator/test_norms.py"),
    "kernels/attention.py": (1, "accelerator/test_families.py"),
    "kernels/backend.py": (1, "accelerator/test_families.py"),
    "kernels/library.py": (1, "accelerator/test_families.py"),
    "kernels/memory.py": (1, "accelerator/test_training.py"),
    "kernels/mt19937.py": (1, "accelerator/test_families.py"),
    "kernels/resampling.py": (3, "accelerator/test_families.py"),
    "ops/normalization/common.py": (1, "accelerator/test_norms.py"),
    "selftest/compute.py": (1, "selftest/test_selftest.py"),
    "selftest/timing.py": (1, "selftest/test_selftest.py"),
    "selftest/topology.py": (3, "selftest/test_selftest.py"),  # of CUDA it only asks for versions
    "selftest/training.py": (1, "selftest/test_selftest.py"),
    "sharding/result_strides.py": (1, "accelerator/test_families.py"),
    "training/random_state.py": (1, "accelerator/test_training.py"),
    "training/same_data.py": (1, "accelerator/test_training.py"),
    "training/same_settings.py": (1, "accelerator/test_training.py"),
}
# Reports of runs, and races between algorithms, that nobody has asked for on a GPU.
UNTRIED = {
    "batching/benchmark.py": 1,
    "demo/launch.py": 1,
    "demo/machine.py": 1,
    "demo/page.py": 1,
    "demo/training.py": 1,
}


def test_all_places_that_ask_for_a_device_are_known() -> None:
    found = Counter(
        str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") for _ in ASKS.finditer(path.read_text())
    )
    assert dict(found) == {file: count for file, (count, _) in KNOWN.items()} | UNTRIED


def test_their_tests_exist() -> None:
    assert not [test for _, test in KNOWN.values() if not (TESTS / test).exists()]
