"""Checkpoints on object stores, which have no atomic rename, no locks, and lists that may be old.

```
URL/epochs/0000000002                      created once: who may commit; the highest one owns the run
    beats/0000000002                       changes while the owner of this epoch lives
    parts/0000000007-<attempt>/shared.safetensors.00000    blocks of a file; names are unique to a save
                               rank-0.safetensors.00000
                               rank-1.receipt              that another rank than the chief has written its file
    commits/0000000002-0000000001          the manifest, created once under the next number: this is the commit
    commits/0000000002-0000000002          or a seal: the next owner has ended this epoch
```

Everything follows from one operation, *create if absent*, of which the store lets one caller succeed. The numbers of
epochs, and of commits within an epoch, have no gaps, so a reader finds the last one by reading: it needs no list. An
owner begins when it has sealed all earlier epochs under their next numbers. From then on none of them can commit, also
not by a request that is under way.
"""
