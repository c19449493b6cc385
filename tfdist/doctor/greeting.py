"""How two tasks recognise each other, before either does anything for the other.

1. The dialer says which protocol it speaks, a nonce, and a digest of its cluster's description.
2. The other side answers with the same of itself, and an HMAC of both nonces; or with why it refuses.
3. The dialer sends its HMAC, and what it is. 4. So does the other side.

The key is TFDIST_TOKEN where that is set. Without it the digest of the cluster is: that keeps other clusters' doctors
and port scanners out, but nobody who knows the cluster's addresses. Nothing is encrypted.
"""

import dataclasses
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

from tfdist.cluster import ClusterSpec
from tfdist.doctor.channel import MAX_GREETING_BYTES, Channel, ChannelError
from tfdist.doctor.finding import printable

PROTOCOL = 1
TOKEN_VARIABLE = "TFDIST_TOKEN"
_PROTOCOL_KEY = "tfdist doctor"
_NONCE_CHARACTERS = 32

STRANGER = "something else than tfdist doctor answers there"
OTHER_CLUSTER = "its cluster's description is not the one of this task"
OTHER_TOKEN = f"its {TOKEN_VARIABLE} is not the one of this task"
OTHER_PROTOCOL = "its tfdist doctor is of a version that this one does not understand"
REFUSALS = (OTHER_CLUSTER, OTHER_TOKEN, OTHER_PROTOCOL)
"""Reasons that seldom pass by waiting."""


class RefusedError(ChannelError):
    """The other side is not who was to be there, or says so of this one."""


@dataclasses.dataclass(frozen=True)
class About:
    """What a task says of itself.

    Args:
        task: Which one it is, `"worker 1"`.
        host: The name of its machine.
        versions: Of Python and libraries, by name.
    """

    task: str
    host: str
    versions: Mapping[str, str]

    @classmethod
    def from_json(cls, document: object) -> "About":
        """Reads it.

        Raises:
            RefusedError: If it is none.
        """
        said = document if isinstance(document, dict) else {}
        versions = said.get("versions")
        if not isinstance(versions, dict) or len(versions) > 16 or not isinstance(said.get("task"), str):
            raise RefusedError(STRANGER)
        named = {printable(name)[:40]: printable(version)[:40] for name, version in versions.items()}
        return cls(printable(said["task"])[:40], printable(said.get("host", ""))[:255], named)


class Passport:
    """What a task proves and says of itself.

    Args:
        about: What it says.
        cluster: Its cluster.
        token: The secret of all tasks, or an empty string.
    """

    def __init__(self, about: About, cluster: ClusterSpec, token: str = "") -> None:
        self._about = about
        described = json.dumps({job: list(addresses) for job, addresses in cluster.jobs.items()}, sort_keys=True)
        self._cluster = hashlib.sha256(described.encode()).hexdigest()
        self._key = (token or self._cluster).encode()

    def introduce(self, channel: Channel, limit_seconds: float) -> About:
        """Recognises whom this task has dialed.

        Raises:
            ChannelError: If it is nobody of this cluster; `RefusedError` where it is clear why.
        """
        channel.max_message_bytes, full = MAX_GREETING_BYTES, channel.max_message_bytes
        nonce = secrets.token_hex(_NONCE_CHARACTERS // 2)
        channel.send(self._opening(nonce), limit_seconds)
        theirs = _opening_of(channel, limit_seconds)
        if not _is(theirs.get("proof"), self._proof("answerer", nonce, theirs["nonce"])):
            raise RefusedError(OTHER_TOKEN)
        proof = self._proof("dialer", nonce, theirs["nonce"])
        channel.send({"proof": proof, "about": dataclasses.asdict(self._about)}, limit_seconds)
        answer = _message(channel, limit_seconds)
        channel.max_message_bytes = full
        return About.from_json(answer.get("about"))

    def recognise(self, channel: Channel, limit_seconds: float) -> About:
        """Recognises who has dialed this task.

        Raises:
            ChannelError: If it is nobody of this cluster; it has been told so where it speaks the protocol.
        """
        channel.max_message_bytes, full = MAX_GREETING_BYTES, channel.max_message_bytes
        theirs = _opening_of(channel, limit_seconds)
        nonce = secrets.token_hex(_NONCE_CHARACTERS // 2)
        if theirs["cluster"] != self._cluster:
            channel.send({"refused": OTHER_CLUSTER}, limit_seconds)
            raise RefusedError(OTHER_CLUSTER)
        proof = self._proof("answerer", theirs["nonce"], nonce)
        channel.send({**self._opening(nonce), "proof": proof}, limit_seconds)
        said = _message(channel, limit_seconds)
        if not _is(said.get("proof"), self._proof("dialer", theirs["nonce"], nonce)):
            channel.send({"refused": OTHER_TOKEN}, limit_seconds)
            raise RefusedError(OTHER_TOKEN)
        about = About.from_json(said.get("about"))
        channel.send({"about": dataclasses.asdict(self._about)}, limit_seconds)
        channel.max_message_bytes = full
        return about

    def _opening(self, nonce: str) -> dict[str, Any]:
        return {_PROTOCOL_KEY: PROTOCOL, "nonce": nonce, "cluster": self._cluster}

    def _proof(self, side: str, dialer_nonce: str, answerer_nonce: str) -> str:
        text = f"tfdist doctor {side} {dialer_nonce} {answerer_nonce} {self._cluster}"
        return hmac.new(self._key, text.encode(errors="replace"), "sha256").hexdigest()


def _opening_of(channel: Channel, limit_seconds: float) -> dict[str, Any]:
    said = _message(channel, limit_seconds)
    if _PROTOCOL_KEY not in said:
        raise RefusedError(STRANGER)
    if said[_PROTOCOL_KEY] != PROTOCOL:
        channel.send({"refused": OTHER_PROTOCOL}, limit_seconds)
        raise RefusedError(OTHER_PROTOCOL)
    nonce = said.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != _NONCE_CHARACTERS or not isinstance(said.get("cluster"), str):
        raise RefusedError(STRANGER)
    return said


def _message(channel: Channel, limit_seconds: float) -> dict[str, Any]:
    said = channel.receive(limit_seconds)
    if "refused" in said:
        raise RefusedError(said["refused"] if said["refused"] in REFUSALS else STRANGER)
    return said


def _is(proof: object, expected: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(errors="replace"), expected.encode())
