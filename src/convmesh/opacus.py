"""Ghost clipping of Opacus for convolutional networks. Importing this module switches it on."""

from .per_sample.opacus import PerSampleLoss as PerSampleLoss
