"""The modes of ParameterServerStrategy: pushes of gradients, asynchronously or in rounds, and federated averaging."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.keras_updates import features_of_steps
from tfdist.utils.argument_checks import check_whole_number, is_number, is_whole_number
from tfdist.utils.weak_identity_map import WeakIdentityMap

_SHORTEST_LIMIT_SECONDS = 600.0
_DEADLINES_UNTIL_LIMIT = 10

# Class and configuration of optimizers that were given before.
_known: WeakIdentityMap[tuple[type, dict[str, Any]]] = WeakIdentityMap()


@dataclasses.dataclass(frozen=True)
class FederatedAveraging:
    """Clients train on their own data for some steps; the servers apply the mean of what they have changed.

    A round: some clients are chosen. Each receives the servers' weights, trains `local_steps` batches by the model's
    own optimizer, whose state starts again in every round, and sends the difference of its weights. The differences are
    averaged, weighted by samples, and `server_optimizer` applies the mean as if it were a gradient. Moving statistics
    of normalization are averaged likewise. Samples do not leave the worker of their client.

    With the default `server_optimizer` this is federated averaging (McMahan et al. 2017, "Communication-Efficient
    Learning of Deep Networks from Decentralized Data"); with Adam it is FedAdam (Reddi et al. 2021, "Adaptive Federated
    Optimization"); `proximal` adds FedProx's term (Li et al. 2020, "Federated Optimization in Heterogeneous Networks").

    >>> FederatedAveraging(local_steps=20, clients=10, clients_per_round=5, server_optimizer="adam").clients
    10

    Attributes:
        local_steps: How many batches a client trains on in a round.
        clients: The number of clients. Client `c` of `C` is at worker `c % num_workers`. `None`: one on each worker.
        clients_per_round: How many clients are chosen for a round. `None`: all.
        server_optimizer: What applies the mean difference: a Keras optimizer, or its name. A schedule of its learning
            rate counts rounds. `None`: `SGD(1.0)`, which replaces the weights by the clients' mean.
        proximal: Adds `proximal / 2 * ||w - w_server||^2` to the loss of each client.
        clip_difference: The largest norm of a client's difference over all trainable variables; larger ones are scaled
            down before they are sent. `None`: no bound.
        deadline_seconds: After how many seconds a round ends without the clients that have not finished. `None`: it
            waits for all but those whose worker is lost.
        min_clients: How many clients must have finished before a round ends.
        seed: The choice of clients depends on this and the number of the round.
    """

    local_steps: int
    clients: int | None = None
    clients_per_round: int | None = None
    server_optimizer: Any = None
    proximal: float = 0.0
    clip_difference: float | None = None
    deadline_seconds: float | None = None
    min_clients: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number("local_steps", self.local_steps, at_least=1, example=20)
        check_whole_number("min_clients", self.min_clients, at_least=1)
        check_whole_number("seed", self.seed, at_least=0)
        if self.clients is not None:
            check_whole_number("clients", self.clients, at_least=1)
        if self.clients_per_round is not None:
            check_whole_number("clients_per_round", self.clients_per_round, at_least=1)
        if not is_number(self.proximal, at_least=0):
            raise ValueError(
                f"Invalid `proximal`. Received: {self.proximal!r}. Expected: a finite number of at least 0, such as "
                "0.01."
            )
        for name in ("clip_difference", "deadline_seconds"):
            value = getattr(self, name)
            if value is not None and (not is_number(value, at_least=0) or value == 0):
                raise ValueError(
                    f"Invalid `{name}`. Received: {value!r}. Expected: a finite number above 0, or None for no bound."
                )
        # Read now: its variables are lost when the strategy connects to the cluster.
        object.__setattr__(self, "_kind_and_config", _checked_optimizer(self.server_optimizer))

    def new_server_optimizer(self) -> Any:
        """Returns a new optimizer like `server_optimizer`, in the present scope."""
        kind, config = self._kind_and_config  # type: ignore[attr-defined]
        return kind.from_config(config)

    def num_clients(self, workers: int) -> int:
        """Returns the number of clients on `workers` workers."""
        return self.clients or workers

    def num_chosen(self, workers: int) -> int:
        """Returns how many clients are chosen for a round."""
        return self.clients_per_round or self.num_clients(workers)

    def check_clients(self, workers: int) -> None:
        """Checks the numbers of clients against each other.

        Raises:
            ValueError: More clients are chosen or needed than there are, or a worker has none.
        """
        clients, chosen = self.num_clients(workers), self.num_chosen(workers)
        if clients < workers:
            raise ValueError(
                f"Workers would have no client. Received: clients={clients} with {workers} workers. Expected: at least "
                "as many clients as workers. Start fewer workers, or raise `clients`."
            )
        if chosen > clients or self.min_clients > chosen:
            raise ValueError(
                f"A round would never be complete. Received: min_clients={self.min_clients}, "
                f"clients_per_round={chosen} and {clients} clients. Expected: min_clients <= clients_per_round <= "
                "clients."
            )

    @property
    def limit_seconds(self) -> float:
        """How long a round waits for `min_clients` clients before it fails."""
        return max(_SHORTEST_LIMIT_SECONDS, _DEADLINES_UNTIL_LIMIT * (self.deadline_seconds or 0.0))


def chosen_clients(seed: int, round_number: int, clients: int, available: Sequence[int], number: int) -> list[int]:
    """Returns the clients of a round: the first `number` of a random order that are available.

    The order depends on the seed and the number of the round alone, so a training that resumes chooses as before.

    >>> chosen_clients(0, 3, 10, available=range(10), number=4)
    [2, 3, 7, 8]
    >>> chosen_clients(0, 3, 10, available=[0, 1, 2], number=4)
    [0, 1, 2]
    """
    order = np.random.default_rng((seed, round_number)).permutation(clients)
    ready = set(available)
    return sorted([int(client) for client in order if client in ready][:number])


def _checked_optimizer(server_optimizer: Any) -> tuple[type, dict[str, Any]]:
    try:
        optimizer = keras.optimizers.SGD(1.0) if server_optimizer is None else keras.optimizers.get(server_optimizer)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"Invalid `server_optimizer`. Received: {server_optimizer!r}. Expected: a Keras optimizer, such as "
            "keras.optimizers.Adam(0.01), or its name."
        ) from error
    if extra := features_of_steps(optimizer):
        raise ValueError(
            f"The servers make one plain update a round. Received: a `server_optimizer` with {', '.join(extra)}. "
            "Expected: an optimizer without. Remove it."
        )
    try:
        kind_and_config = _known[optimizer] = type(optimizer), optimizer.get_config()
    except tf.errors.OpError as error:  # it was created before a strategy has connected this process to a cluster
        before = _known.get(optimizer)
        if before is None:
            raise ValueError(
                "The variables of the optimizer were lost when this process was connected to a cluster. Received: a "
                "`server_optimizer` that was created before the first ParameterServerStrategy. Expected: one that is "
                "created after it, or given to the mode before it. Create a new one."
            ) from error
        kind_and_config = before
    return kind_and_config


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """Each worker pulls the variables, computes a gradient and pushes it, independently of the others.

    Other workers may update the variables between a worker's pull and its push; the number of these updates is the
    *staleness* of the push. If a worker dies, its batch is given to another worker, so each batch is pushed at least
    once.

    >>> Asynchronous(max_staleness=4)
    Asynchronous(max_staleness=4)

    Attributes:
        max_staleness: The largest staleness of a push, in updates; workers wait to keep it. `None`: no bound.
    """

    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None and not is_whole_number(self.max_staleness, at_least=0):
            raise ValueError(
                f"Invalid `max_staleness`. Received: {self.max_staleness!r}. Expected: a whole number of at "
                "least 0, counting updates, or None for no bound."
            )


@dataclasses.dataclass(frozen=True)
class Synchronous:
    """All workers compute on the same variables, and their gradients make one update. This is a round.

    A batch of `fit` is split by rows over the workers. The update equals that of one process on the complete batch,
    whatever the loss divides by: samples, valid entries of masks, weights, or nothing. If a worker dies, another one
    computes its part; each round updates once.

    >>> Synchronous(backup_workers=1)
    Synchronous(backup_workers=1)

    Attributes:
        backup_workers: How many of the slowest workers a round does not wait for. Their parts of that batch are left
            out; they take part again when they have finished.
    """

    backup_workers: int = 0

    def __post_init__(self) -> None:
        if not is_whole_number(self.backup_workers, at_least=0):
            raise ValueError(
                f"Invalid `backup_workers`. Received: {self.backup_workers!r}. Expected: a whole number of at "
                "least 0 and less than the number of workers."
            )


Mode = Asynchronous | Synchronous | FederatedAveraging


def max_running_pushes(mode: Asynchronous, workers: int) -> int | None:
    """How many pushes may run at the same time; `None`: no bound.

    >>> max_running_pushes(Asynchronous(max_staleness=4), 3), max_running_pushes(Asynchronous(max_staleness=0), 3)
    (3, 1)
    """
    if mode.max_staleness is None:
        return None
    return min(mode.max_staleness // 2 + 1, 2 * workers)


def max_push_window(mode: Asynchronous, workers: int) -> int | None:
    """How many pushes may start before the oldest running one, which counts, has ended; `None`: no bound.

    With `r` running pushes and a window of `w`, a push meets the updates of at most `r - 1` pushes that started before
    it and of `w - 1` that started after it.

    >>> max_push_window(Asynchronous(max_staleness=4), 3), max_push_window(Asynchronous(max_staleness=100), 3)
    (3, 96)
    """
    running = max_running_pushes(mode, workers)
    return None if mode.max_staleness is None or running is None else mode.max_staleness - running + 2
