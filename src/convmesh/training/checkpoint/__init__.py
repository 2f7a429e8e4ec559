"""Checkpoints of a distributed training, which go on in any number of processes, and are whole or not there.

A checkpoint is a folder: a safetensors file for each rank that had something to write, and `manifest.json`, which says
what is where, how long every file is, and the checksums. Nothing in it can be executed. It is written under another
name, and gets its own when everything is on disk: a crash in the middle leaves the last one as it was.
"""

from .folder import latest_checkpoint as latest_checkpoint
from .load import Checkpoint as Checkpoint
from .load import load_checkpoint as load_checkpoint
from .save import PendingCheckpoint as PendingCheckpoint
from .save import save_checkpoint as save_checkpoint
