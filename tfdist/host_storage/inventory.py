"""What of which checkpoints is on the disks of which hosts, and which checkpoint to restore from them."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.checkpoint.checkpoint import list_checkpoints, list_unfinished, read_manifest
from tfdist.checkpoint.errors import CorruptCheckpointError, OtherFormatError
from tfdist.checkpoint.manifest import FileRecord, Manifest
from tfdist.host_storage.peer_files import Saved

Json = dict[str, Any]
_MOST_AT_ONCE = 32  # hosts that are asked


def inventory_of(directory: Path) -> Json:
    """Returns what is in the directory of this host, as JSON.

    Raises:
        OSError: If the directory cannot be read.
    """
    manifests, damaged, others, files = [], [], [], []
    for sequence, path in list_checkpoints(directory).items():
        try:
            manifest = read_manifest(path)
        except OtherFormatError as error:
            others.append([sequence, str(error)])
            continue
        except CorruptCheckpointError as error:
            damaged.append(f"{path.name}: {error}")
            continue
        manifests.append(_common(manifest).to_bytes().decode())
        files.append([asdict(_saved(manifest)), _sizes(path)])
    for sequence, attempt, path in list_unfinished(directory):
        if attempt:  # else a removal
            files.append([asdict(Saved(sequence, attempt)), _sizes(path)])
    return {"manifests": manifests, "damaged": damaged, "other formats": others, "files": files}


def numbers_in(inventory: Json) -> list[int]:
    """Returns the numbers of the checkpoints of a host."""
    return [Manifest.from_bytes(text.encode()).sequence for text in inventory["manifests"]]


@dataclass(frozen=True)
class Found:
    """A committed checkpoint.

    Attributes:
        manifest: Its manifest; `here` is empty.
        holders: The hosts that have each file, by name.
    """

    manifest: Manifest
    holders: Mapping[str, Sequence[int]]

    @property
    def saved(self) -> Saved:
        """Which save it is of."""
        return _saved(self.manifest)

    def to_json(self) -> Json:
        """Returns it as JSON."""
        return {"manifest": self.manifest.to_bytes().decode(), "holders": dict(self.holders)}

    @classmethod
    def from_json(cls, content: Json) -> "Found":
        """Returns what `to_json` has described."""
        return cls(Manifest.from_bytes(content["manifest"].encode()), content["holders"])


Check = Callable[[int, Saved, Mapping[str, FileRecord]], Mapping[str, str]]


def newest_of(
    inventories: Mapping[int, Json], describe: Callable[[int], str], check: Check
) -> tuple[Found | None, list[str]]:
    """Finds the newest checkpoint that was committed, and of which every file is intact on some host.

    A checkpoint is committed if any host has its manifest, because all files were on the disks before. Of two with one
    number, of different attempts, the later one counts.

    Args:
        inventories: The `inventory_of` each host, by its number.
        describe: Returns the name of a host, for messages.
        check: Reads files of a save on a host, and returns which are not intact there, and why.

    Returns:
        The checkpoint, or None; and the reasons why newer ones were skipped.

    Raises:
        OtherFormatError: If another version of tfdist wrote a newer checkpoint.
    """
    others = [other for inventory in inventories.values() for other in inventory["other formats"]]
    skipped = [f"{reason}, on {describe(host)}" for host, one in inventories.items() for reason in one["damaged"]]
    for manifest in _committed(inventories):
        _check_formats(others, manifest.sequence)
        found, damage = _intact(manifest, inventories, check)
        if all(found.holders.values()):
            return found, [reason for reason in skipped if _sequence_in(reason) > manifest.sequence]
        missing = [name for name, hosts in found.holders.items() if not hosts]
        skipped.append(
            f"ckpt-{manifest.sequence:010d}: "
            + "; ".join(_reason(name, manifest, damage, describe) for name in missing)
        )
    _check_formats(others, -1)
    return None, skipped


def _check_formats(others: Sequence[tuple[int, str]], sequence: int) -> None:
    for number, message in others:
        if number > sequence:
            raise OtherFormatError(message)


def _committed(inventories: Mapping[int, Json]) -> Iterator[Manifest]:
    texts = {text for inventory in inventories.values() for text in inventory["manifests"]}
    manifests = [Manifest.from_bytes(text.encode()) for text in texts]
    distinct = {_saved(manifest): manifest for manifest in sorted(manifests, key=lambda one: one.saved_at)}
    return iter(sorted(distinct.values(), key=lambda one: (one.sequence, one.saved_at, one.attempt), reverse=True))


def _intact(
    manifest: Manifest, inventories: Mapping[int, Json], check: Check
) -> tuple[Found, Mapping[int, Mapping[str, str]]]:
    holders: dict[str, list[int]] = {name: [] for name in manifest.files}
    present: dict[int, dict[str, FileRecord]] = {}
    for host, inventory in inventories.items():
        sizes: dict[str, int] = next(
            (sizes for saved, sizes in inventory["files"] if Saved(**saved) == _saved(manifest)), {}
        )
        present[host] = {name: record for name, record in manifest.files.items() if name in sizes}

    def damage_on(host: int) -> Mapping[str, str]:
        return check(host, _saved(manifest), present[host]) if present[host] else {}

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:  # each host reads every byte
        damage = dict(zip(present, pool.map(damage_on, present), strict=True))
    for host, records in present.items():
        for name in records.keys() - damage[host].keys():
            holders[name].append(host)
    return Found(manifest, holders), damage


def _reason(
    name: str,
    manifest: Manifest,
    damage: Mapping[int, Mapping[str, str]],
    describe: Callable[[int], str],
) -> str:
    reasons = [f"{reasons[name]}, on {describe(host)}" for host, reasons in damage.items() if name in reasons]
    were_on = [entry.host for entry in manifest.hosts if name in entry.files]
    where = f"; it was saved on {' and '.join(map(repr, were_on))}" if were_on else ""
    return " and ".join(reasons or [f"{name} is on none of the hosts that are here"]) + where


def _saved(manifest: Manifest) -> Saved:
    return Saved(manifest.sequence, manifest.attempt)


def _common(manifest: Manifest) -> Manifest:
    """Returns what the manifests of a checkpoint have in common on all hosts."""
    return replace(manifest, here=())


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                sizes[entry.name] = entry.stat().st_size
    return sizes


def _sequence_in(reason: str) -> int:
    return int(reason.removeprefix("ckpt-")[:10])
