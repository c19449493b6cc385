"""One save over several hosts: each worker writes its part and sends a copy, the chief decides, each host commits."""

import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tfdist.checkpoint.checkpoint import directory_name, unfinished_name
from tfdist.checkpoint.errors import CheckpointError, HostError
from tfdist.checkpoint.manifest import MANIFEST_FILE, SHARED_FILE, FileRecord, HostFiles, Manifest, rank_file
from tfdist.checkpoint.shard import EncodedShard, Json, Shard, dump_metadata, write_shard
from tfdist.checkpoint.sharded_save import EARLIER_INTACT, encode_parts, number_exists, second_save
from tfdist.host_storage.hosts import received
from tfdist.host_storage.meeting_of_hosts import Meeting
from tfdist.host_storage.peer_files import Saved
from tfdist.utils import atomic_files

_log = logging.getLogger("tfdist")


class HostSave:
    """One worker's part of a save.

    1. It writes its part to the disk of its host; the leader of a host writes what all have in common, too.
    2. It sends copies of its part to other hosts, and reports to the chief what is on which disk.
    3. The chief tells all that everything is there. Only then is there a manifest, on each host, written by its leader.
    4. The checkpoint is saved when all hosts have their manifest.
    """

    def __init__(
        self, directory: Path, sequence: int, attempt: str, meeting: Meeting, *, is_taken: bool = False
    ) -> None:
        """Describes the save. `is_taken`: whether a complete checkpoint has this number."""
        self._is_taken = is_taken
        self._directory, self._sequence, self._attempt = directory, sequence, attempt
        self._meeting, self._rank = meeting, meeting.rank
        self._unfinished = directory / unfinished_name(sequence, attempt)

    def run(self, rank_shard: Shard, shared_shard: Shard | None, metadata: Json) -> Manifest | None:
        """Saves; all workers call this. Returns the manifest, None on workers that do not lead their host.

        Raises:
            CheckpointError: If it is not saved. Earlier checkpoints are intact.
            OSError: If the file system fails.
            ValueError: If something cannot be saved.
        """
        decision: Json | None = None
        is_in_doubt = False
        try:
            try:
                report = self._write(rank_shard, shared_shard)
                metadata = json.loads(dump_metadata(metadata))  # as it will be read
            except BaseException as error:
                if self._rank:  # the chief tells all below
                    self._send_to_chief("part", {"failed": f"{type(error).__name__}: {error}"})
                raise
            if self._rank == 0:
                decision = {"manifest": self._collect(report, metadata).to_bytes().decode()}
                is_in_doubt = True  # if it reaches some, this is a checkpoint
                self._send_to_all(decision)
            else:
                self._send_to_chief("part", report)
                is_in_doubt = True  # the chief may decide that this is a checkpoint, so the files stay
                # It waits for all parts first.
                decision = self._receive(0, "decision", 2 * self._meeting.timeout_seconds)
                is_in_doubt = False
                if "failed" in decision:
                    raise CheckpointError(decision["failed"])
        except BaseException as error:
            if self._rank == 0 and decision is None:
                self._send_to_all({"failed": str(error)})
            if self._meeting.leads and not is_in_doubt:
                shutil.rmtree(self._unfinished, ignore_errors=True)
            raise
        if not self._meeting.leads:
            return None
        manifest = Manifest.from_bytes(decision["manifest"].encode())
        self._commit(manifest)
        return manifest

    def _write(self, rank_shard: Shard, shared_shard: Shard | None) -> Json:
        if (self._unfinished / rank_file(self._rank)).exists():
            raise second_save(self._sequence, self._attempt, self._rank)
        if self._is_taken:
            raise number_exists(self._sequence, str(self._directory / directory_name(self._sequence)))
        atomic_files.make_directory(self._unfinished)
        parts = encode_parts(self._rank, rank_shard, shared_shard)
        records = {name: self._written(name, part) for name, part in parts.items()}
        atomic_files.flush(self._unfinished)
        own, saved = rank_file(self._rank), Saved(self._sequence, self._attempt)
        timeout = self._meeting.timeout_seconds
        for keeper in self._meeting.hosts.keepers_of(self._rank, records[own].size_bytes):
            try:
                self._meeting.files.send(self._meeting.addresses[keeper], saved, own, parts[own], records[own], timeout)
            except HostError as error:
                host = self._meeting.hosts.describe(self._meeting.hosts.host_of(keeper))
                raise HostError(f"A copy of {own} could not be sent to {host}. Received: {error}") from error
        return {name: asdict(record) for name, record in records.items()}

    def _written(self, name: str, part: EncodedShard) -> FileRecord:
        return FileRecord(part.size_bytes, write_shard(self._unfinished / name, part, self._meeting.files.write))

    def _collect(self, report: Json, metadata: Json) -> Manifest:
        """Waits for the reports of all parts, and returns the manifest."""
        reports = {0: report}
        end = time.monotonic() + self._meeting.timeout_seconds
        for rank in range(1, self._meeting.messages.num_workers):
            reports[rank] = self._receive(rank, "part", max(end - time.monotonic(), 0.0))
            if "failed" in reports[rank]:
                raise CheckpointError(
                    f"Rank {rank} could not write its part of the checkpoint. Received: {reports[rank]['failed']}"
                )
        hosts = self._meeting.hosts
        shared = {hosts.host_of(rank): FileRecord(**reports[rank][SHARED_FILE]) for rank in hosts.leaders}
        records = {SHARED_FILE: self._common_record(shared)}
        for rank, files in sorted(reports.items()):
            records[rank_file(rank)] = FileRecord(**files[rank_file(rank)])
        part_bytes = [records[rank_file(rank)].size_bytes for rank in range(len(reports))]
        held = []
        for host, name in enumerate(hosts.names):
            held_files = hosts.files_of(host, part_bytes)
            held.append(HostFiles(name, held_files if shared[host] == records[SHARED_FILE] else held_files[1:]))
        num_ranks = self._meeting.messages.num_workers
        return Manifest(self._sequence, self._attempt, num_ranks, time.time(), records, metadata, hosts=tuple(held))

    def _common_record(self, shared: Mapping[int, FileRecord]) -> FileRecord:
        """Returns what most hosts have written of what all workers have in common; the first host's, if none is."""
        common, count = Counter(shared.values()).most_common(1)[0]
        common = common if 2 * count > len(shared) else shared[0]
        others = [self._meeting.hosts.describe(host) for host, record in shared.items() if record != common]
        if others:
            _log.warning(
                "What the workers have in common differs. Received: other bytes from %s in checkpoint %d. Expected: "
                "equal weights, optimizers and arrays of callbacks. Those of the others are restored, and these hosts "
                "have no copy of them. The callback WeightComparison finds workers with other weights.",
                ", ".join(others),
                self._sequence,
            )
        return common

    def _commit(self, manifest: Manifest) -> None:
        meeting = self._meeting
        try:
            commit(self._directory, self._unfinished, manifest, manifest.hosts[meeting.host].files)
        except OSError as error:
            if self._rank:
                self._send_to_chief("committed", {"failed": str(error)})
            raise
        if self._rank:
            self._send_to_chief("committed", {"committed": True})
            return
        for rank in meeting.hosts.leaders[1:]:
            answer = self._receive(rank, "committed", meeting.timeout_seconds)
            if "failed" in answer:
                host = meeting.hosts.describe(meeting.hosts.host_of(rank))
                raise HostError(
                    f"Checkpoint {self._sequence} is complete, but {host} could not record it. Received: "
                    f"{answer['failed']}. Expected: a disk on which all hosts may write."
                )

    def _receive(self, sender: int, what: str, timeout_seconds: float) -> Any:
        try:
            return received(self._meeting.messages, sender, self._name(what), timeout_seconds)
        except HostError as error:
            host = self._meeting.hosts.describe(self._meeting.hosts.host_of(sender))
            raise HostError(
                f"A host did not answer. Received: nothing from worker {sender} of {host} within {timeout_seconds:g} "
                f"s, of a save of checkpoint {self._sequence}. Expected: a part of every worker. If they are slow, "
                f"raise peer_timeout_seconds of FailureRecovery. {EARLIER_INTACT}"
            ) from error

    def _send_to_chief(self, what: str, value: Json) -> None:
        self._meeting.messages.send(0, self._name(what), value)

    def _send_to_all(self, decision: Json) -> None:
        leaders = self._meeting.hosts.leaders
        for rank in range(1, self._meeting.messages.num_workers):  # only leaders write the manifest, which may be long
            sent = decision if "failed" in decision or rank in leaders else {"saved": True}
            self._meeting.messages.send(rank, self._name("decision"), sent)

    def _name(self, what: str) -> str:
        return f"save {self._sequence} {self._attempt} {what}"


def commit(directory: Path, unfinished: Path, manifest: Manifest, here: tuple[str, ...]) -> Path:
    """Makes a checkpoint of an unfinished save: writes the manifest of a host that has the files `here`, and renames.

    Raises:
        OSError: If the file system fails.
    """
    for name in {*manifest.files}.difference(here):
        (unfinished / name).unlink(missing_ok=True)  # what this worker has in common with nobody
    atomic_files.write(unfinished / MANIFEST_FILE, replace(manifest, here=here).to_bytes())
    atomic_files.flush(unfinished)
    path = directory / directory_name(manifest.sequence)
    if os.path.lexists(path):  # of another attempt, or corrupt
        atomic_files.remove(path)
    os.rename(unfinished, path)
    atomic_files.flush(directory)
    return path
