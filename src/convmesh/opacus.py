"""Ghost clipping of Opacus for convolutional networks. Importing this module enables it."""

from .per_sample.opacus import PerSampleLoss as PerSampleLoss
