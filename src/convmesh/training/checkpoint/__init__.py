"""Checkpoints of a distributed training that load on any number of processes, and are either complete or absent.

A checkpoint is a folder: a safetensors file for each rank that had something to write, and `manifest.json` with the
location of each tensor, and the length and checksums of every file. Nothing in it can be executed. It is written under
a temporary name, and renamed when everything is on disk: a crash in the middle leaves the previous one intact.
"""

from .folder import latest_checkpoint as latest_checkpoint
from .load import Checkpoint as Checkpoint
from .load import load_checkpoint as load_checkpoint
from .save import PendingCheckpoint as PendingCheckpoint
from .save import save_checkpoint as save_checkpoint
