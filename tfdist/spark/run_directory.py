"""The directory of a run in the store: the data, the checkpoints, and the file of the model."""

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.data import PartitionedData, from_parquet, from_spark
from tfdist.utils import atomic_files

_DESCRIPTION = "run.json"


def store_path(store: str | None) -> Path:
    """Returns the directory of a store, created if missing.

    Raises:
        ValueError: If there is none, or it is on no file system that all hosts mount.
    """
    path = (store or "").removeprefix("file://")
    if not path or "://" in path:
        raise ValueError(
            f"There is no store that the workers can share. Received: store={store!r}. Expected: a directory that "
            "the driver and all executors see under the same path, as of NFS or a mounted object store. Give "
            "KerasEstimator(store='/shared/runs'), where the data and checkpoints of a training are."
        )
    Path(path).mkdir(parents=True, exist_ok=True)
    return Path(os.path.abspath(path))


class RunDirectory:
    """The directory of one training.

    A run with a name stays, and resumes if the same training is started again. Others are removed at the end.

    Args:
        store: The store.
        run_id: The name of the run, or None.
    """

    def __init__(self, store: Path, run_id: str | None) -> None:
        if run_id is not None and Path(run_id).name != run_id:
            raise ValueError(
                f"Invalid `run_id`. Received: run_id={run_id!r}. Expected: a name that a directory can have, without "
                "slashes. Choose another one."
            )
        self._run_id, self._stays = run_id, run_id is not None
        # With a prefix, so that no other directory of the store is taken for an incomplete run, and removed.
        self.path = store / f"tfdist-run-{run_id or secrets.token_hex(8)}"

    @property
    def has_name(self) -> bool:
        """Whether the run stays in the store."""
        return self._stays

    def data(self, train: Any, validation: Any, fingerprint: Callable[[], str]) -> tuple[PartitionedData, Any]:
        """Writes the rows, or finds those of the same run, and returns the data to train on and to validate with.

        Args:
            train: A DataFrame.
            validation: A DataFrame, or None.
            fingerprint: Computes what a run with the same name must have in common with this one.

        Raises:
            ValueError: If the store has another run of this name.
        """
        parts = {"train": train} | ({} if validation is None else {"validation": validation})
        description = {"fingerprint": fingerprint() if self._stays else "", "parts": sorted(parts)}
        file = self.path / _DESCRIPTION
        if file.exists():
            if json.loads(file.read_bytes()) != description:
                raise ValueError(
                    f"The store has another run of this name. Received: run_id={self._run_id!r} for other rows, "
                    "columns or parameters than those that it has begun with. Expected: the same, to resume it. "
                    f"Choose another `run_id`, or remove {self.path}."
                )
            found = {name: from_parquet(self.path / name) for name in parts}
        else:
            shutil.rmtree(self.path, ignore_errors=True)
            found = {name: from_spark(part, store=self.path / name, keep=True) for name, part in parts.items()}
            with atomic_files.replacing(file) as opened:
                opened.write(json.dumps(description).encode())
        for name, data in found.items():
            if not data.num_rows:
                raise ValueError(
                    f"There are no rows to {'train on' if name == 'train' else 'validate with'}. Received: 0 rows. "
                    "Expected: at least one. Check the DataFrame and `validation`."
                )
        return found["train"], found.get("validation")

    def remove(self) -> None:
        """Removes the directory, unless the run has a name."""
        if not self._stays:
            shutil.rmtree(self.path, ignore_errors=True)
