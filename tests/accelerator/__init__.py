"""A stand-in for a GPU and for NCCL, on which every rule can be run without either."""

DEVICE = "acc"
BACKEND = "accl"


def install() -> None:
    """Let this process have both."""
    from tests.accelerator import device, group

    device.install()
    group.register()
