"""A checkpoint on an object store: a `Checkpoint` whose files are copied to this host when they are read."""

import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

from tfdist.checkpoint.checkpoint import Checkpoint, directory_name
from tfdist.checkpoint.manifest import Manifest
from tfdist.checkpoint.remote.parts import download_part, folder_of
from tfdist.checkpoint.remote.remote_objects import Objects


class RemoteCheckpoint(Checkpoint):
    """A committed checkpoint. Its copy is in the directory for temporary files until this object is collected.

    `path` is that of the copy, which has only the files that were read.
    """

    def __init__(self, objects: Objects, manifest: Manifest, *, read_all: bool = False) -> None:
        """Describes a checkpoint; with `read_all`, copies and verifies all files.

        Raises:
            CorruptCheckpointError: If the manifest, or a file, is not what was written.
            RemoteStoreError: If the store does not answer.
        """
        self._objects, self._folder = objects, folder_of(manifest.sequence, manifest.attempt)
        self._records = manifest.files
        temporary = Path(tempfile.gettempdir(), f"tfdist-checkpoint-{secrets.token_hex(8)}")
        super().__init__(temporary / directory_name(manifest.sequence), written=manifest)
        weakref.finalize(self, _remove_copy, temporary, os.getpid())
        for name in manifest.files if read_all else ():
            self._check(name, verify_checksums=True)

    def _check(self, name: str, *, verify_checksums: bool) -> None:
        path = self.path / name
        if not path.exists():
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self.path.mkdir(exist_ok=True)
            try:
                download_part(self._objects.for_operation(), self._folder, name, self._records[name], path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        super()._check(name, verify_checksums=verify_checksums)


def _remove_copy(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a fork's, whose parent still reads it
        shutil.rmtree(folder, ignore_errors=True)
