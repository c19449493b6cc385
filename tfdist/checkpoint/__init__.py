"""An atomic, checksummed store of checkpoints, sharded by rank, and its background writer. Knows no TensorFlow.

A checkpoint is a directory:

```
DIR/ckpt-0000000007/manifest.json          format, sizes and XXH3 of the files, facts, its own checksum
                    shared.safetensors     what is equal on all ranks, written by rank 0
                    rank-0.safetensors     what differs between ranks, written by each
                    rank-1.safetensors
DIR/.unfinished-0000000008-<attempt>/      a save that is running, or was cut off
DIR/.lock                                  of the process that trains there; says which one
```

It is written under its temporary name, every file is forced to the disk, the manifest comes last, and renaming makes
it count: whatever is killed when, a directory named `ckpt-…` is complete. Whether it still is, its checksums say; the
newest whole one is found also behind broken ones.

Tensors lie in safetensors files. That format holds no pickle, so that reading one runs no code of it; it is kept by
others and read by many programs; reading needs neither TensorFlow nor all of the file in memory; and the library writes
without holding Python's lock (since 0.8), so that training goes on meanwhile. TensorFlow's own checkpoint format needs
TensorFlow to be listed or verified, which `tfdist checkpoints` and the supervisor of a run do without.

>>> import tempfile
>>> import numpy as np
>>> with tempfile.TemporaryDirectory() as directory:
...     store = CheckpointStore(directory)
...     weights, seeds = Shard({"kernel": np.ones((2, 3))}, {}), Shard({"seed": np.array(5)}, {"python": [1, 2]})
...     saved = store.save(7, "first", rank=0, world=1, own=seeds, shared=weights, facts={"step": 700})
...     newest, passed_over = store.newest()
...     newest.sequence, newest.facts, newest.of_rank(0).notes, newest.shared().tensors["kernel"].shape
(7, {'step': 700}, {'python': [1, 2]}, (2, 3))
"""

from tfdist.checkpoint.background_writer import BackgroundWriter
from tfdist.checkpoint.checkpoint import Checkpoint
from tfdist.checkpoint.entry import Entry
from tfdist.checkpoint.errors import CheckpointError, OtherFormatError
from tfdist.checkpoint.lock import DirectoryLock
from tfdist.checkpoint.shard import Json, Shard
from tfdist.checkpoint.store import CheckpointStore

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "DirectoryLock",
    "Entry",
    "Json",
    "OtherFormatError",
    "Shard",
]
