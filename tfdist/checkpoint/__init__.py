"""An atomic, checksummed checkpoint store, sharded by rank, and its background writer. Does not import TensorFlow.

A checkpoint is a directory:

```
DIR/ckpt-0000000007/manifest.json          format, metadata, sizes and XXH3 checksums of the files, its own checksum
                    shared.safetensors     what is equal on all ranks, written by rank 0
                    rank-0.safetensors     what differs between ranks, written by each rank
                    rank-1.safetensors
                    worker-0.index         what a stage holds, written by its worker (model parallelism)
                    worker-0.data-00000-of-00001
DIR/.unfinished-0000000008-<attempt>/      a save in progress, or an interrupted one
DIR/.lock                                  names the process that trains in the directory
```

A save writes all files under the temporary name and flushes each to disk; rank 0, or in an elastic training the oldest
worker, writes the manifest last and renames the directory. So a directory named `ckpt-…` was complete when it got this
name, whatever was killed when. Checksums show later damage: a reader skips a corrupt checkpoint and takes the newest
complete one.

Tensors are stored as safetensors. The format contains no pickle, so reading a file runs none of its code; other
programs read it; reading needs neither TensorFlow nor the complete file in memory; and the library writes without
holding Python's lock (since 0.8), so training continues meanwhile. TensorFlow's own checkpoint format needs TensorFlow
to list or verify a checkpoint, which `tfdist checkpoints` and the supervisor of a run do without.

>>> import tempfile
>>> import numpy as np
>>> with tempfile.TemporaryDirectory() as directory:
...     store = CheckpointStore(directory)
...     weights, seeds = Shard({"kernel": np.ones((2, 3))}), Shard({"seed": np.array(5)}, {"python": [1, 2]})
...     shards = {"rank_shard": seeds, "shared_shard": weights}
...     saved = store.save(7, "first", rank=0, num_ranks=1, **shards, metadata={"step": 700})
...     newest, skipped = store.newest()
...     newest.sequence, newest.metadata, newest.read_rank(0).metadata, newest.read_shared().tensors["kernel"].shape
(7, {'step': 700}, {'python': [1, 2]}, (2, 3))
"""

from tfdist.checkpoint.background_writer import BackgroundWriter
from tfdist.checkpoint.checkpoint import Checkpoint, CheckpointInfo
from tfdist.checkpoint.checkpoint_store import CheckpointStore
from tfdist.checkpoint.directory_lock import DirectoryLock
from tfdist.checkpoint.errors import CheckpointError, HostError, OtherFormatError, RemoteStoreError
from tfdist.checkpoint.shard import Shard
from tfdist.checkpoint.sharded_save import SavingRanks, WorkerFiles
from tfdist.checkpoint.training_store import TrainingStore, open_store

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointStore",
    "DirectoryLock",
    "HostError",
    "OtherFormatError",
    "RemoteStoreError",
    "SavingRanks",
    "Shard",
    "TrainingStore",
    "WorkerFiles",
    "open_store",
]
