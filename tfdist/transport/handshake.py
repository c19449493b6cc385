"""Mutual authentication of two processes that share a token, without sending the token.

1. Both sides send a hello: service, protocol number, version of tfdist, and a random nonce. The client's hello also has
   a keyed fingerprint of its cluster's description.
2. The client proves the token: an HMAC of both hellos. The server checks it and answers with its own proof.
3. Both sides derive one key per direction. The keys authenticate every later message.

Each HMAC has its own label, so a proof cannot be reflected; the nonces make it different each time. Messages are not
encrypted: they can be read on the network.
"""

import dataclasses
import hashlib
import hmac
import json
import secrets
import string

import tfdist
from tfdist.transport.authenticated_messages import decode_object
from tfdist.transport.transport_errors import (
    ClusterMismatchError,
    FrameError,
    HandshakeError,
    InvalidProofError,
    ProtocolMismatchError,
    TokenRejectedError,
)

_NONCE_CHARACTERS = 64
_MAX_NAME_CHARACTERS = 40
_WRONG_TOKEN, _WRONG_CLUSTER = "wrong token", "wrong cluster"


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What a process proves in a handshake, and expects of the other side."""

    service: str  # the program, for example `"tfdist doctor"`
    protocol: int  # number of the service's protocol
    token: str = dataclasses.field(repr=False)  # secret of all processes. Empty: `cluster` takes its place.
    # digest of the cluster's description, or empty. Both sides must have the same.
    cluster: str = dataclasses.field(default="", repr=False)
    same_version: bool = False  # whether both sides must run the same version of tfdist

    def __post_init__(self) -> None:
        if not (self.token or self.cluster):
            raise ValueError("credentials without a secret")

    @property
    def secret(self) -> bytes:
        return (self.token or self.cluster).encode(errors="surrogateescape")

    def fingerprint(self, nonce: str) -> str:
        """Returns a digest of the cluster that reveals nothing to those who do not know the cluster."""
        return hmac.digest(self.cluster.encode(), nonce.encode(), "sha256").hex()


@dataclasses.dataclass(frozen=True)
class Hello:
    """First message of each side."""

    service: str  # the program
    protocol: int
    version: str  # version of tfdist
    nonce: str  # random, used once
    cluster: str = ""  # fingerprint of the client's cluster; empty in the server's hello

    @classmethod
    def of(cls, credentials: Credentials, *, is_client: bool) -> "Hello":
        nonce = secrets.token_hex(_NONCE_CHARACTERS // 2)
        cluster = credentials.fingerprint(nonce) if is_client else ""
        return cls(credentials.service, credentials.protocol, tfdist.__version__, nonce, cluster)

    @classmethod
    def decode(cls, body: bytes) -> "Hello":
        """Reads a hello; raises a FrameError if the body is none."""
        received = decode_object(body)
        values = [received.get(field.name) for field in dataclasses.fields(cls)]
        service, protocol, version, nonce, cluster = values
        names = (service, version)
        if (
            type(protocol) is not int
            or not all(isinstance(name, str) and name.isprintable() for name in names)
            or not all(len(str(name)) <= _MAX_NAME_CHARACTERS for name in names)
            or not _is_hex(nonce)
            or not (cluster == "" or _is_hex(cluster))
        ):
            raise FrameError("the message is not a hello of tfdist")
        return cls(str(service), protocol, str(version), str(nonce), str(cluster))

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    def require_compatible(self, other: "Hello", *, same_version: bool, reply: bytes = b"") -> None:
        """Checks that both sides understand each other. The error carries `reply` for the other side."""
        if self.service != other.service:
            raise HandshakeError(f"the other side is {other.service}")
        if self.protocol != other.protocol or (same_version and self.version != other.version):
            raise ProtocolMismatchError(
                f"this is tfdist {self.version} (protocol {self.protocol}), the other side is tfdist {other.version} "
                f"(protocol {other.protocol})",
                reply=reply,
            )


@dataclasses.dataclass(frozen=True)
class SessionKeys:
    """Keys of one side, which authenticate the messages behind the handshake."""

    send_key: bytes  # authenticates sent messages
    receive_key: bytes  # authenticates received messages


class ClientHandshake:
    """The client's side, without I/O: bodies of frames in, bodies of frames out."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._own = Hello.of(credentials, is_client=True)
        self.hello = self._own.encode()
        """The first body to send."""
        self._hellos = (b"", b"")

    def prove(self, answer: bytes) -> bytes:
        """Takes the server's hello and returns the proof to send."""
        _raise_refusal(decode_object(answer))
        self._own.require_compatible(Hello.decode(answer), same_version=self._credentials.same_version)
        self._hellos = (self.hello, answer)
        return _encode_proof(self._mac("client proof"))

    def finish(self, answer: bytes) -> SessionKeys:
        """Takes the server's proof and returns the keys."""
        _raise_refusal(decode_object(answer))
        if not is_proof(answer, self._mac("server proof")):
            raise InvalidProofError("the server does not know the token")
        return SessionKeys(self._mac("client key"), self._mac("server key"))

    def _mac(self, label: str) -> bytes:
        return derive_mac(self._credentials, label, *self._hellos)


class ServerHandshake:
    """The server's side, without I/O: bodies of frames in, bodies of frames out."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._own = Hello.of(credentials, is_client=False)
        self._hellos: tuple[bytes, bytes] | None = None
        self.keys: SessionKeys | None = None
        """Set once the client has proved the token."""

    def receive(self, body: bytes) -> bytes:
        """Takes the next body of the client and returns the body to answer with.

        A client that is incompatible or does not know the token learns why from the error's `reply`, if that is not
        empty.
        """
        if self._hellos is None:
            client_hello, own_body = Hello.decode(body), self._own.encode()
            # The client of another version learns this side's version from the reply.
            self._own.require_compatible(client_hello, same_version=self._credentials.same_version, reply=own_body)
            expected = self._credentials.fingerprint(client_hello.nonce)
            if not hmac.compare_digest(client_hello.cluster.encode(), expected.encode()):
                raise ClusterMismatchError(_WRONG_CLUSTER, reply=_encode_refusal(_WRONG_CLUSTER))
            self._hellos = (body, own_body)
            return own_body
        if not is_proof(body, derive_mac(self._credentials, "client proof", *self._hellos)):
            raise TokenRejectedError(_WRONG_TOKEN, reply=_encode_refusal(_WRONG_TOKEN))
        labels = ("server key", "client key", "server proof")
        server_key, client_key, proof = (derive_mac(self._credentials, label, *self._hellos) for label in labels)
        self.keys = SessionKeys(server_key, client_key)
        return _encode_proof(proof)


def derive_mac(credentials: Credentials, label: str, client_hello: bytes, server_hello: bytes) -> bytes:
    """Returns the HMAC of both hellos under a label."""
    hellos = b"".join(hashlib.sha256(hello).digest() for hello in (client_hello, server_hello))
    text = f"{credentials.service}: {label}".encode() + b"\0" + hellos
    return hmac.digest(credentials.secret, text, "sha256")


def is_proof(body: bytes, expected: bytes) -> bool:
    """Returns whether a body carries the expected proof, compared in constant time."""
    proof = decode_object(body).get("proof")
    if not isinstance(proof, str):
        raise FrameError("the message is not a proof of the token")
    return hmac.compare_digest(proof.encode(errors="replace"), expected.hex().encode())


def _encode_proof(proof: bytes) -> bytes:
    return json.dumps({"proof": proof.hex()}).encode()


def _encode_refusal(reason: str) -> bytes:
    return json.dumps({"refused": reason}).encode()


def _raise_refusal(answer: dict[str, object]) -> None:
    reason = answer.get("refused")
    if reason == _WRONG_TOKEN:
        raise TokenRejectedError(_WRONG_TOKEN)
    if reason == _WRONG_CLUSTER:
        raise ClusterMismatchError(_WRONG_CLUSTER)
    if reason is not None:
        raise HandshakeError("the server refused the connection")


def _is_hex(text: object) -> bool:
    return isinstance(text, str) and len(text) == _NONCE_CHARACTERS and set(text) <= set(string.hexdigits)
