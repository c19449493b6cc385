"""Errors of the transport; callers translate them into messages for users."""


class TransportError(Exception):
    """Base class of all transport errors. The text is a reason without a subject: "the connection was closed"."""


class FrameError(TransportError):
    """The received bytes are not a valid message."""


class ConnectionClosedError(TransportError):
    """The other side is gone, too slow, or cannot be trusted any more."""


class HandshakeError(TransportError):
    """The handshake failed. `reply` is a frame body that tells the other side, or empty."""

    def __init__(self, reason: str, *, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.reply = reply


class ProtocolMismatchError(HandshakeError):
    """The two sides run incompatible versions."""


class ClusterMismatchError(HandshakeError):
    """The two sides describe different clusters."""


class TokenRejectedError(HandshakeError):
    """The server rejected the client's proof of the token."""


class InvalidProofError(HandshakeError):
    """The server does not know the token."""
