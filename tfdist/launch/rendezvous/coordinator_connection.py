"""Connects a supervisor to the coordinator, and turns transport errors into usage errors."""

from collections.abc import Callable

from tfdist.transport.connection import Connection
from tfdist.transport.dial_with_retry import dial
from tfdist.transport.handshake import Credentials
from tfdist.transport.transport_errors import (
    ConnectionClosedError,
    InvalidProofError,
    ProtocolMismatchError,
    TokenRejectedError,
)
from tfdist.utils.argument_checks import UsageError

PROTOCOL = 2


def rendezvous_credentials(token: str) -> Credentials:
    """Returns the credentials of a supervisor or the coordinator: the token, and the same version of tfdist."""
    return Credentials("tfdist rendezvous", PROTOCOL, token, same_version=True)


def connect_to_coordinator(
    host: str, port: int, token: str, *, timeout_seconds: float, say: Callable[[str], None]
) -> Connection:
    """Connects to the coordinator, which may not be up yet.

    Args:
        host: Host of the coordinator.
        port: Port of the coordinator.
        token: The token of the run.
        timeout_seconds: How long to try.
        say: Shows the user why it takes long.

    Raises:
        UsageError: If the coordinator does not answer in time, or has another token, protocol or version.
    """
    where = f"{host}:{port}"
    try:
        return dial(
            host,
            port,
            rendezvous_credentials(token),
            timeout_seconds=timeout_seconds,
            on_wait=lambda reason: say(f"waiting for the rendezvous at {where} ({reason})"),
        )
    except ProtocolMismatchError as error:
        raise UsageError(
            f"The hosts have different versions of tfdist. Received: {error}, at {where}. Expected: the same version. "
            "Install the same version of tfdist on all hosts."
        ) from error
    except TokenRejectedError as error:
        raise UsageError(
            f"The token is wrong. Received: a token that the rendezvous at {where} rejects. Expected: the token of "
            "node 0. Use the same --token-file or TFDIST_TOKEN on every host."
        ) from error
    except InvalidProofError as error:
        raise UsageError(
            f"The server at {where} does not know the token. Received: an invalid proof. Expected: node 0 of this run. "
            "Correct --rendezvous. If that is node 0, somebody intercepts the connection."
        ) from error
    except ConnectionClosedError as error:
        raise UsageError(
            f"The rendezvous did not answer. Received: {error} at {where} for {timeout_seconds:g} s. Expected: tfdist "
            "run --node-rank 0 on that host, and no firewall that blocks the port. Start node 0, correct --rendezvous, "
            "or increase --start-timeout."
        ) from error
