"""Connects a worker with the other workers of its cluster, as the environment says."""

import atexit
import hashlib
import json
import logging
import os
from typing import Any

import tensorflow as tf

from tfdist import cluster as cluster_module
from tfdist.cluster.wait_for_peers import check_names
from tfdist.collectives.exchange_boundary import ExchangeBoundary
from tfdist.collectives.key_values import key_values
from tfdist.elastic.step_transactions import StepTransactions
from tfdist.exchange.exchange_errors import ExchangeError
from tfdist.exchange.group_listener import TOKEN_VARIABLE, encryption_of
from tfdist.exchange.worker_exchange import Exchange
from tfdist.membership.decisions import View
from tfdist.membership.elastic_group import ElasticGroup
from tfdist.strategies.cluster_resolver import beginning_workers, silence_limit_of_environment
from tfdist.tensorflow_internals.aborted_collectives import can_join_again, watch_exchange
from tfdist.utils.cores_and_ports import host_and_port, is_loopback

_ELASTIC_SILENCE_SECONDS = 10.0
_log = logging.getLogger("tfdist")

_boundary: ExchangeBoundary | None = None
_group: ElasticGroup | None = None
_transactions: StepTransactions | None = None


def workers_boundary(
    spec: dict[str, list[str]], resolver: Any, timeout_seconds: float, *, is_elastic: bool = False
) -> ExchangeBoundary | None:
    """Connects this worker with the others of its cluster, once for each process, and again after a mismatch.

    Workers that called different exchanges, or were late, are all still there, and meet again in new strategies.

    Args:
        spec: The cluster.
        resolver: Says which task this worker is.
        timeout_seconds: How long the others may take to start.
        is_elastic: Whether workers may be lost: see `elastic_group`.

    Returns:
        The boundary to the exchange with them; `None` without other workers.

    Raises:
        ValueError: A variable of the environment is invalid, or an earlier strategy of this process has other workers
            or another `elastic`.
        TimeoutError, OSError, TransportError: See `Exchange`.
    """
    global _boundary, _group, _transactions
    tasks = [(job, index) for job in ("chief", "worker") for index in range(len(spec.get(job, ())))]
    if len(tasks) < 2:
        return None
    addresses = [spec[job][index] for job, index in tasks]
    rank = tasks.index((resolver.task_type, resolver.task_id))
    _check_alike(is_elastic)
    if _boundary is not None and _group is None and can_join_again(_boundary.exchange.failure):
        atexit.unregister(_close_in_process)
        _boundary.exchange.close()
        _boundary = None
    if _boundary is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token and rank == 0 and not all(is_loopback(host_and_port(address)[0]) for address in addresses):
            _log.warning(
                "The workers trust everybody who knows their addresses. Received: workers on several hosts, and no "
                "%s. Expected: a secret of all workers. Set the same %s for all, or start them by `tfdist run`.",
                TOKEN_VARIABLE,
                TOKEN_VARIABLE,
            )
        attempt = [os.environ.get(name, "") for name in ("TFDIST_RUN_ID", "TFDIST_ATTEMPT")]
        cluster = hashlib.sha256(json.dumps([addresses, attempt]).encode()).hexdigest()
        options: dict[str, Any] = {"token": token, "cluster": cluster, "encryption": encryption_of(os.environ)}
        beginning = beginning_workers(len(addresses)) if is_elastic else len(addresses)
        if is_elastic:
            _group = ElasticGroup(
                rank,
                addresses,
                beginning=beginning,
                offer=lambda: {"exchanged": key_values.exchanged},
                timeout_seconds=timeout_seconds,
                silence_seconds=min(_ELASTIC_SILENCE_SECONDS, silence_limit_of_environment()),
                **options,
            )
            members = _group.membership
            key_values.remember(members.offered.get("exchanged", {}))
            exchange = _group.exchange(None if members.has_joined_late else members.view)
        else:
            exchange = Exchange(
                rank,
                addresses,
                timeout_seconds=timeout_seconds,
                silence_seconds=silence_limit_of_environment(),
                check_missing=check_names if cluster_module.is_slurm_step() else None,
                **options,
            )
        _boundary = ExchangeBoundary(exchange, beginning=beginning)
        if _group is not None:
            _transactions = StepTransactions(_group, _failure, _connect, _boundary.all_reduce, _boundary.handles)
            _boundary.run_alone = _transactions.run_alone
        key_values.use(exchange.control, exchange.members)
        watch_exchange(_failure if _group is None else lambda: None)  # steps of an elastic training survive it
        atexit.register(_close_in_process, os.getpid())
    elif (_boundary.exchange.rank, _boundary.exchange.addresses) != (rank, addresses):
        raise ValueError(
            "A process is a worker of one cluster. Received: "
            f"worker {rank} of {addresses}, after a strategy as worker {_boundary.exchange.rank} of "
            f"{_boundary.exchange.addresses}. Expected: the same cluster for all strategies of a process. Start a new "
            "process for another cluster."
        )
    return _boundary


def _check_alike(is_elastic: bool) -> None:
    if _boundary is not None and is_elastic != (_group is not None):
        raise ValueError(
            "All strategies of a process are elastic, or none: they share its connections. Received: a "
            f"MultiWorkerMirroredStrategy with `elastic={is_elastic}`, after one with `elastic={not is_elastic}`. "
            f"Expected: `elastic={not is_elastic}`, as the first strategy of this process. Give both the same "
            "`elastic`, or start a new process."
        )


def step_transactions() -> StepTransactions:
    """Returns what runs the steps of this process in an elastic training."""
    assert _transactions is not None
    return _transactions


def own_process() -> int:
    """Returns which process of its rank this one is in an elastic training, counted from 1."""
    group = step_transactions().group
    return group.membership.number // len(group.addresses) + 1


def _connect(view: View) -> None:
    """Exchanges with the members of another view from now on.

    Raises:
        WorkerLostError: One of them is lost meanwhile.
    """
    assert _boundary is not None and _group is not None
    _boundary.exchange.close(has_ended=False)
    exchange = _group.exchange(view)
    _boundary.use(exchange)
    key_values.use(exchange.control, exchange.members)


def _failure() -> ExchangeError | None:
    return None if _boundary is None else _boundary.exchange.failure


def raise_failed_exchange(error: BaseException) -> None:
    """Raises the `ExchangeError` that an error of TensorFlow reports, if it reports one."""
    failure = _failure()
    if failure is not None and isinstance(error, tf.errors.OpError):
        raise failure from None


def _close_in_process(process: int) -> None:
    if os.getpid() == process and _boundary is not None:  # a forked child shares the connections
        _boundary.exchange.close()
        if _group is not None:
            _group.close()
