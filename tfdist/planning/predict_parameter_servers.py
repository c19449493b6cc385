"""Steps of workers that pull weights from parameter servers and push gradients to them.

Source of the bytes: `docs/choosing_a_strategy.md`; the servers of N workers send and receive N times the model in a
step.
"""

import dataclasses

from tfdist.planning.cost_terms import Conditions, Prediction, expected_slowest, replica_bytes, scaled, step_of
from tfdist.planning.group_exchanges import exchange_of
from tfdist.planning.link_costs import TransferCosts
from tfdist.planning.measurements import DENSE, GATHER, Measurements
from tfdist.planning.predict_data_parallel import rows_of_workers

# The messages of a round: the chief calls, the worker pulls, pushes and returns, the chief calls the servers, and they
# answer.
_MESSAGES_IN_TURN = 6


@dataclasses.dataclass(frozen=True)
class ParameterServers:
    """The options of parameter servers."""

    servers: int = 1
    asynchronous: bool = False  # whether each worker's batch is a separate update
    method: str = DENSE  # how gradients are encoded, or `DENSE`


def server_seconds(nbytes: float, workers: int, servers: int, bytes_per_second: float) -> float:
    """Returns how long links are busy until each worker has all variables of a model, or has pushed all gradients.

    >>> server_seconds(1e6, workers=8, servers=2, bytes_per_second=1e6)
    4.0
    >>> server_seconds(1e6, workers=2, servers=4, bytes_per_second=1e6)  # the workers' links
    1.0
    """
    return max(workers / servers, 1.0) * nbytes / bytes_per_second


def variables(measured: Measurements) -> int:
    """Returns how many messages carry the variables of a model. Each variable is sent by itself.

    A layer with weights counts as two variables, kernel and bias. If the model is no graph of layers, there is at least
    one variable for each bucket.
    """
    program = measured.program
    return max(2 * sum(layer.parameters > 0 for layer in program.layers), len(program.bucket_ready))


def predict_parameter_servers(
    measured: Measurements, conditions: Conditions, workers: int, options: ParameterServers
) -> Prediction:
    """Returns what is predicted of a global batch.

    Synchronous workers pull, compute their rows, push, and wait for the update of the servers. Asynchronous ones
    compute whole batches of the program, each at its own pace: the slower of workers and servers determines how many
    are computed. Pulls and pushes of different workers then overlap with computation.
    """
    program, link = measured.program, conditions.link
    transfers = TransferCosts(measured.machine.transfers)
    pushed = exchange_of(program, options.method, 2)
    share = (
        sum(collective.nbytes for collective in pushed.collectives)
        if options.method != DENSE
        else program.gradient_bytes
    )
    pull = program.variable_bytes
    copies = transfers.core_seconds(GATHER, pull, 2) + transfers.core_seconds(GATHER, share, 2)
    calls = _MESSAGES_IN_TURN * (transfers.seconds(GATHER, 0.0, 2) + link.latency_seconds)
    copies += 2 * variables(measured) * transfers.core_seconds(GATHER, 0.0, 2)
    code = pushed.compute_seconds if options.method != DENSE else 0.0
    steps = [
        (rows, scaled(step_of(program, rows), slowness))
        for rows, slowness in rows_of_workers(
            program.rows * (workers if options.asynchronous else 1), workers, conditions.speeds, is_balanced=False
        )
    ]
    rows, step = max(steps, key=lambda pair: pair[1].seconds)
    gradients = step.forward_seconds + step.backward_seconds
    core = (copies + code) / conditions.cores
    link_seconds = server_seconds(pull + share, workers, options.servers, link.bytes_per_second)
    served = max(workers / options.servers, 1.0) * copies / conditions.cores
    memory = replica_bytes(program, rows) - program.slot_bytes + pushed.state_bytes + share
    memory += measured.machine.connection_bytes
    if options.asynchronous:
        worker_seconds = gradients + core + calls + (pull + share) / link.bytes_per_second
        update = step.update_seconds / options.servers  # the servers apply the pushes of all workers
        seconds = max(worker_seconds / workers, link_seconds / workers, served / workers, update)
        return Prediction(seconds, gradients / workers, core / workers, link_seconds / workers, share / workers, memory)
    update = step.update_seconds / options.servers
    seconds = gradients + max(core, served) + calls + link_seconds + update
    seconds = expected_slowest(seconds, step.deviation_seconds, workers)
    return Prediction(seconds, gradients + update, max(core, served), link_seconds, share, memory)
