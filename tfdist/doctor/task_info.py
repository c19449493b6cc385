"""How the tasks of a cluster prove that they belong together, and what they say about themselves."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from tfdist.cluster import ClusterSpec
from tfdist.transport.channel import Channel
from tfdist.transport.handshake import Credentials
from tfdist.transport.transport_errors import FrameError
from tfdist.utils.formatting import printable

PROTOCOL = 2
TOKEN_VARIABLE = "TFDIST_TOKEN"
_MAX_VERSIONS = 16


@dataclasses.dataclass(frozen=True)
class TaskInfo:
    """What a task says about itself.

    Args:
        task: Its name, for example `"worker 1"`.
        host: Its hostname.
        versions: Versions of Python and the libraries, by name.
    """

    task: str
    host: str
    versions: Mapping[str, str]

    @classmethod
    def from_json(cls, document: object) -> "TaskInfo":
        """Reads what another task sent.

        Raises:
            FrameError: If the document is malformed.
        """
        message = document if isinstance(document, dict) else {}
        task, versions = message.get("task"), message.get("versions")
        if not isinstance(versions, dict) or len(versions) > _MAX_VERSIONS or not isinstance(task, str):
            raise FrameError("the message does not describe a task")
        shown = {printable(name)[:40]: printable(version)[:40] for name, version in versions.items()}
        return cls(printable(task)[:40], printable(message.get("host", ""))[:255], shown)

    def exchange(self, channel: Channel, timeout_seconds: float) -> "TaskInfo":
        """Sends this description and returns that of the other side.

        Raises:
            TransportError: If the other side does not answer, or the answer is malformed.
        """
        channel.send(dataclasses.asdict(self), timeout_seconds)
        return self.from_json(channel.receive(timeout_seconds))


def doctor_credentials(cluster: ClusterSpec, token: str = "") -> Credentials:
    """Returns the credentials of a task.

    Without a token the cluster's description is the secret: that excludes port scanners and the tasks of other
    clusters, but nobody who knows the cluster's addresses.

    Args:
        cluster: The cluster.
        token: Value of `TFDIST_TOKEN`, or empty.
    """
    description = json.dumps({job: list(addresses) for job, addresses in cluster.jobs.items()}, sort_keys=True)
    digest = hashlib.sha256(description.encode()).hexdigest()
    return Credentials("tfdist doctor", PROTOCOL, token, cluster=digest)
