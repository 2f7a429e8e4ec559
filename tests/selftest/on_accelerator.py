"""`python -m tests.selftest.on_accelerator FOLDER`, as a rank: the self-test on the stand-in accelerator."""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch

from convmesh.cli import main
from tests import accelerator

if __name__ == "__main__":
    accelerator.install()
    # Every family on it: tests/accelerator/test_families.py. What only a real one can tell:
    with patch.object(torch.accelerator, "get_memory_info", lambda device: (2**29, 2**30)):
        sys.exit(
            main(["selftest", "--quick", "--only", "convolution", "batch_norm", "attention", "--out", sys.argv[1]])
        )
