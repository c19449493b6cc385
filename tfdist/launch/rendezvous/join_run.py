"""Joins a run over several hosts: connects to the coordinator, which node 0 starts first."""

import contextlib
import socket
from collections.abc import Callable, Iterator

from tfdist.launch.processes.output import Console
from tfdist.launch.rendezvous.coordinator_process import CoordinatorProcess, rendezvous_credentials
from tfdist.launch.rendezvous.node_client import NodeClient
from tfdist.launch.restart.error_file import ErrorFile
from tfdist.launch.run_spec import NodeOptions, RunSpec
from tfdist.transport.nonblocking_connection import NonblockingConnection, dial
from tfdist.transport.transport_errors import (
    ConnectionClosedError,
    InvalidProofError,
    ProtocolMismatchError,
    TokenRejectedError,
)
from tfdist.utils.argument_checks import UsageError


@contextlib.contextmanager
def join_run(node: NodeOptions, spec: RunSpec, console: Console, *, error_file: ErrorFile) -> Iterator[NodeClient]:
    """Joins the run, and leaves it at the end of the `with` block.

    Call this while the process has one thread.

    Yields:
        The run policy of this host.

    Raises:
        UsageError: If it cannot join. No worker was started then.
    """
    with contextlib.ExitStack() as undo:
        has_joined = False
        if node.rank == 0:
            coordinator = CoordinatorProcess(node.host, node.port, node.token, spec, console)
            undo.callback(lambda: coordinator.close(is_graceful=has_joined))
        connection = connect_to_coordinator(
            node.host, node.port, node.token, timeout_seconds=spec.start_timeout_seconds, say=console.say
        )
        client = NodeClient(connection, node.address, console=console, error_file=error_file)
        undo.callback(client.close)
        client.join(
            {
                "node": node.rank,
                "host": socket.gethostname(),
                "workers": spec.workers,
                "options": spec.common_options,
            }
        )
        console.say(f"node {node.rank} of {spec.nodes} has joined run {client.run_id}")
        has_joined = True
        yield client


def connect_to_coordinator(
    host: str, port: int, token: str, *, timeout_seconds: float, say: Callable[[str], None]
) -> NonblockingConnection:
    """Connects to the coordinator, which may not be up yet.

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
