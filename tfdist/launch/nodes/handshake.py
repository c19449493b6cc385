"""How two supervisors prove to each other that they know the token, without sending it.

1. The joiner sends a greeting: protocol, version of tfdist, and a random nonce. The coordinator sends its own.
2. The joiner proves the token: an HMAC of both greetings. The coordinator checks it, and answers with its proof.
3. Both derive from token and greetings a key for each direction; every later message is authenticated by them.

Each of these HMACs has a label of its own, so that none can be sent back as another; the nonces make them new each
time. What is not encrypted: anybody on the way can read the messages, which hold addresses and workers' last lines.
"""

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass

import tfdist
from tfdist.cluster.json_object import json_object
from tfdist.launch.nodes.frames import FrameError

PROTOCOL = 1
_NONCE_CHARACTERS = 64
_JOINER, _COORDINATOR = b"tfdist rendezvous: joiner", b"tfdist rendezvous: coordinator"


@dataclass(frozen=True)
class Greeting:
    """What a side says of itself.

    Args:
        protocol: Number of the protocol.
        version: Version of tfdist.
        nonce: Random, never used again.
    """

    protocol: int
    version: str
    nonce: str

    @classmethod
    def new(cls) -> "Greeting":
        """Returns a greeting of this process."""
        return cls(PROTOCOL, tfdist.__version__, secrets.token_hex(_NONCE_CHARACTERS // 2))

    @classmethod
    def decode(cls, body: bytes) -> "Greeting":
        """Reads a greeting.

        Raises:
            FrameError: If it is none.
        """
        said = decode_object(body)
        protocol, version, nonce = (said.get(key) for key in ("protocol", "version", "nonce"))
        if type(protocol) is not int or not isinstance(version, str) or not isinstance(nonce, str):
            raise FrameError("no greeting of tfdist")
        if len(nonce) != _NONCE_CHARACTERS or len(version) > 40 or not version.isprintable():
            raise FrameError("no greeting of tfdist")
        return cls(protocol, version, nonce)

    def encode(self) -> bytes:
        """Returns the bytes to send."""
        return json.dumps(vars(self)).encode()

    def why_not(self, other: "Greeting") -> str:
        """Why the two do not understand each other, or an empty string.

        >>> Greeting(1, "0.1.0", "a").why_not(Greeting(1, "0.2.0", "b"))
        'this is tfdist 0.1.0 (protocol 1), the other side is tfdist 0.2.0 (protocol 1)'
        """
        if (self.protocol, self.version) == (other.protocol, other.version):
            return ""
        return (
            f"this is tfdist {self.version} (protocol {self.protocol}), the other side is tfdist {other.version} "
            f"(protocol {other.protocol})"
        )


@dataclass(frozen=True)
class Secrets:
    """What both sides derive from the token and their greetings.

    Args:
        joiner_proof: Proves that the joiner knows the token.
        coordinator_proof: Proves it of the coordinator.
        joiner_key: Authenticates what the joiner sends.
        coordinator_key: Authenticates what the coordinator sends.
    """

    joiner_proof: bytes
    coordinator_proof: bytes
    joiner_key: bytes
    coordinator_key: bytes

    @classmethod
    def derive(cls, token: str, *, joiner: Greeting, coordinator: Greeting) -> "Secrets":
        """Derives them."""
        greetings = b"".join(hashlib.sha256(side.encode()).digest() for side in (joiner, coordinator))

        def mac(label: bytes) -> bytes:
            return hmac.digest(token.encode(), label + b"\0" + greetings, "sha256")

        return cls(
            mac(_JOINER + b" proof"), mac(_COORDINATOR + b" proof"), mac(_JOINER + b" key"), mac(_COORDINATOR + b" key")
        )


def encode_proof(proof: bytes) -> bytes:
    """Returns the message that carries a proof."""
    return json.dumps({"proof": proof.hex()}).encode()


def is_proof(body: bytes, expected: bytes) -> bool:
    """Whether a message carries the proof that is expected, compared in constant time.

    Raises:
        FrameError: If it is no such message at all.
    """
    proof = decode_object(body).get("proof")
    if not isinstance(proof, str):
        raise FrameError("no proof of the token")
    return hmac.compare_digest(proof.encode(errors="replace"), expected.hex().encode())


def encode_refusal(reason: str) -> bytes:
    """Returns the message by which the coordinator refuses a joiner that has not proved the token."""
    return json.dumps({"refused": reason}).encode()


def refusal(body: bytes) -> str:
    """Returns the reason in such a message, or an empty string for any other.

    Raises:
        FrameError: If it is no message at all.
    """
    reason = decode_object(body).get("refused", "")
    return "".join(filter(str.isprintable, str(reason)))[:500]


def decode_object(body: bytes) -> dict[str, object]:
    """Reads a JSON object.

    Raises:
        FrameError: If it is none.
    """
    try:
        return json_object(body)
    except ValueError as error:
        raise FrameError("no JSON object") from error
