"""Joins a run over several hosts; on node 0, starts the coordinator first."""

import contextlib
import socket
from collections.abc import Iterator

from tfdist.launch.processes.output import Console
from tfdist.launch.rendezvous.coordinator_connection import connect_to_coordinator
from tfdist.launch.rendezvous.coordinator_process import CoordinatorProcess
from tfdist.launch.rendezvous.node_client import NodeClient
from tfdist.launch.restart.error_file import ErrorFile
from tfdist.launch.run_config import NodeOptions, RunConfig


@contextlib.contextmanager
def join_run(
    node: NodeOptions, config: RunConfig, console: Console, *, workers: int, error_file: ErrorFile
) -> Iterator[NodeClient]:
    """Joins the run, and leaves it at the end of the `with` block.

    Call this while the process has one thread.

    Args:
        node: This host.
        config: The configuration of the run, as this host has it.
        console: Shows messages.
        workers: Number of workers of this host.
        error_file: Describes failed attempts.

    Yields:
        The run policy of this host.

    Raises:
        UsageError: If it cannot join. No worker was started then.
    """
    with contextlib.ExitStack() as undo:
        has_joined = False
        if node.rank == 0:
            coordinator = CoordinatorProcess(node.host, node.port, node.token, config, console)
            undo.callback(lambda: coordinator.close(is_graceful=has_joined))
        connection = connect_to_coordinator(
            node.host, node.port, node.token, timeout_seconds=config.start_timeout, say=console.say
        )
        client = NodeClient(connection, node.address, say=console.say, error_file=error_file)
        undo.callback(client.close)
        client.join(
            {
                "node": node.rank,
                "host": socket.gethostname(),
                "workers": workers,
                "options": {
                    "--nodes": config.nodes,
                    "--max-restarts": config.max_restarts,
                    "--min-workers": config.min_workers,
                },
            }
        )
        console.say(f"node {node.rank} of {node.nodes} has joined run {client.run_id}")
        has_joined = True
        yield client
