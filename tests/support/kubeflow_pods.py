"""Runs the containers of a manifest's pods as processes on loopback, and restarts them by the policy of their pods."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from child_environment import child_environment

from tfdist.utils.cores_and_ports import ReservedPorts

LIMIT_SECONDS = 120


def on_loopback(variables: Mapping[Any, Mapping[str, str]]) -> dict[Any, dict[str, str]]:
    """Returns the variables with each address of TF_CONFIG replaced by a free port of this host."""
    [cluster] = {json.dumps(json.loads(one["TF_CONFIG"])["cluster"]) for one in variables.values()}
    jobs = json.loads(cluster)
    with ReservedPorts(sum(map(len, jobs.values()))) as reserved:
        ports = iter(reserved.ports)
    moved = {job: [f"127.0.0.1:{next(ports)}" for _ in addresses] for job, addresses in jobs.items()}
    return {
        pod: {**one, "TF_CONFIG": json.dumps({**json.loads(one["TF_CONFIG"]), "cluster": moved})}
        for pod, one in variables.items()
    }


class Pod:
    """The container of a pod.

    Args:
        container: Of the manifest.
        variables: Its environment, besides what the manifest sets.
        restart_policy: "OnFailure", "Always" or "Never".
        directory: Working directory, which replaces the image, and contains the mounted volumes.
        name: Of its output file.
    """

    def __init__(
        self,
        container: Mapping[str, Any],
        variables: Mapping[str, str],
        restart_policy: str,
        directory: Path,
        name: str,
    ) -> None:
        command = [*container["command"], *container.get("args", [])]
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        assert command[0] == "python", command
        self._command = [sys.executable, *(f"{directory}{word}" if word in mounts else word for word in command[1:])]
        for mount in mounts:
            Path(f"{directory}{mount}").mkdir(exist_ok=True)
        own = {variable["name"]: variable["value"] for variable in container.get("env", [])}
        self._variables, self._policy, self._directory = {**own, **variables}, restart_policy, directory
        self._output = directory / f"{name}.txt"
        self.codes: list[int] = []
        self._start()

    def _start(self) -> None:
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env=child_environment(**self._variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def restarts(self) -> int:
        """Number of restarts of its container."""
        return len(self.codes) - self.has_succeeded

    @property
    def has_succeeded(self) -> bool:
        """Whether the container has exited with 0 and is not restarted."""
        return self._policy != "Always" and self.codes[-1:] == [0]

    def check(self) -> None:
        """Restarts the container if it has exited and its policy says so."""
        code = None if self.has_succeeded else self.process.poll()
        if code is None:
            return
        self.codes.append(code)
        if self._policy == "Always" or (code and self._policy == "OnFailure"):
            self._start()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def output(self) -> str:
        return self._output.read_text()

    def delete(self) -> None:
        """Kills the container."""
        self.process.kill()
        self.process.wait()


def run_until(condition: Any, pods: Mapping[Any, Pod], *, backoff_limit: int) -> None:
    """Plays kubelet and operator until `condition()` holds."""
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        for pod in pods.values():
            pod.check()
        restarts = sum(pod.restarts for pod in pods.values())
        if restarts >= backoff_limit or time.monotonic() > end:
            texts = "\n".join(f"{name} {pod.codes}:\n{pod.output()[-3000:]}" for name, pod in pods.items())
            raise AssertionError(f"{restarts} restarts\n{texts}")
        time.sleep(0.05)
