"""An object store in memory with the faults of real ones, as a file system of fsspec. Its time passes with requests."""

import random
from typing import Any

from tfdist.checkpoint.remote.remote_objects import Objects
from tfdist.utils.remote_requests import Connection


class Killed(BaseException):
    """The process has ended: in the middle of a request, before or after it counted."""


class World:
    """The objects, and requests that reach them later.

    `honours`: whether creations of what is there fail. `old_lists`: how often a list is an old one.
    """

    def __init__(self, seed: int = 0, *, honours: bool = True, old_lists: float = 0.6) -> None:
        self.random, self.honours, self.old_lists = random.Random(seed), honours, old_lists
        self.objects: dict[str, bytes] = {}
        self.now = 0.0
        self.faults = 0
        self._late: list[tuple[float, str, bytes, str]] = []
        self._for_next_owner: list[tuple[str, bytes, str]] = []
        self._old_lists: dict[str, dict[str, dict[str, int]]] = {}

    def pass_time(self, seconds: float) -> None:
        """Lets late requests arrive."""
        self.now += seconds
        for request in sorted(self._late):
            if request[0] <= self.now:
                self._late.remove(request)
                self.apply(*request[1:])

    def apply(self, path: str, content: bytes, mode: str) -> bool:
        """Writes or removes an object; returns whether that was possible."""
        if mode == "remove":
            return self.objects.pop(path, None) is not None
        if mode == "create" and self.honours and path in self.objects:
            return False
        self.objects[path] = content
        if "/epochs/" in path:
            for request in self._for_next_owner:
                self.arrive_later(*request)
            self._for_next_owner = []
        return True

    def arrive_after_next_owner(self, path: str, content: bytes, mode: str) -> None:
        """Writes or removes an object within the minute after an epoch is created."""
        self._for_next_owner.append((path, content, mode))

    def arrive_later(self, path: str, content: bytes, mode: str) -> None:
        """Writes or removes an object within the next minute."""
        self._late.append((self.now + self.random.uniform(0, 60), path, content, mode))

    def list(self, path: str) -> dict[str, dict[str, int]]:
        """Lists what is below a path, often as it was some time ago."""
        present = {
            name: {"size": len(content)} for name, content in self.objects.items() if name.startswith(f"{path}/")
        }
        old = self._old_lists.get(path)
        if old is None or self.random.random() < 0.3:
            self._old_lists[path] = present
        return old if old is not None and self.random.random() < self.old_lists else present


class FaultyFileSystem:
    """What one process sees of a world: a share of its requests fails; it is killed after `requests_left`."""

    def __init__(self, world: World, fault_rate: float = 0.0) -> None:
        self.world, self.fault_rate = world, fault_rate
        self.requests_left: int | None = None

    def invalidate_cache(self) -> None:
        """Nothing is cached."""

    def cat_file(self, path: str, start: int, end: int | None) -> bytes:
        self._request("503")
        if path not in self.world.objects:
            raise FileNotFoundError(path)
        return self.world.objects[path][start:end]

    def pipe_file(self, path: str, content: bytes, mode: str = "overwrite") -> None:
        if not self._change(path, content, mode):
            raise FileExistsError(path)

    def rm_file(self, path: str) -> None:
        if not self._change(path, b"", "remove"):
            raise FileNotFoundError(path)

    def _change(self, path: str, content: bytes, mode: str) -> bool:
        kind = self.world.random.choice(["not at all", "lost reply", "late", "after the next owner"])
        try:
            self._request("reset")
        except OSError:
            if kind == "lost reply":
                self.world.apply(path, content, mode)
            elif kind == "late":
                self.world.arrive_later(path, content, mode)
            elif kind == "after the next owner":
                self.world.arrive_after_next_owner(path, content, mode)
            raise
        is_done = self.world.apply(path, content, mode)
        if self.requests_left == 0 and self.world.random.random() < 0.5:
            raise Killed  # before the reply
        return is_done

    def find(self, path: str, detail: bool) -> dict[str, dict[str, int]]:
        assert detail
        self._request("503")
        if found := self.world.list(path):
            return found
        return {path: {"size": 0}} if self.world.list(path) else {}  # s3fs looks for the prefix itself then

    def _request(self, failure: str) -> None:
        self.world.pass_time(0.05)
        if self.requests_left is not None:
            if self.requests_left <= 0:
                raise Killed
            self.requests_left -= 1
        if self.world.random.random() < self.fault_rate:
            self.world.faults += 1
            if self.world.random.random() < 0.1:
                self.world.pass_time(0.5)
                raise TimeoutError
            raise OSError(failure)


def objects_of(
    file_system: Any, root: str = "bucket/run", *, patience_seconds: float = 120.0, **connection: Any
) -> Objects:
    """Requests in the time of the file system's world."""
    world = file_system.world
    return Objects(
        Connection(lambda: file_system, **connection),
        root,
        patience_seconds=patience_seconds,
        sleep=world.pass_time,
        clock=lambda: world.now,
    )
