"""The chief's part of federated averaging: the clients of a round, their functions, and what they report."""

import dataclasses
import itertools
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compression import Policy
from tfdist.keras_internals.local_copies import InitialSlots
from tfdist.keras_internals.scheduled_training import set_server_state
from tfdist.parameter_server.chief import ChiefTraining
from tfdist.parameter_server.client_training import ClientInfo, train
from tfdist.parameter_server.gradient_buffers import GradientBuffers, sample_fractions
from tfdist.parameter_server.gradient_push import GradientEncoder
from tfdist.parameter_server.modes import FederatedAveraging, chosen_clients
from tfdist.parameter_server.push_statistics import StatsCollector
from tfdist.parameter_server.scheduler import pause
from tfdist.parameter_server.step_results import named_log_part
from tfdist.parameter_server.unsupported_features import reject_unsupported_clients
from tfdist.parameter_server.worker_datasets import ClientDatasets, WorkerIterator
from tfdist.parameter_server.worker_functions import WorkerFunctions
from tfdist.servers.server_monitor import explains_lost_servers
from tfdist.tensorflow_internals.cluster_coordinator import PinnedCall, call_on_worker

_DISCARDED = -1


@dataclasses.dataclass(frozen=True)
class _ClientCall:
    """The part of a client that its worker computes."""

    call: PinnedCall
    client: int
    buffer: int
    round: int
    scheduled_at: float  # by `time.monotonic()`


class FederatedChief(ChiefTraining):
    """Trains one model by federated averaging.

    A worker has at most one call at a time. One that is late, or whose worker is lost, stays outstanding: its buffer
    and its worker are free again when it has ended.
    """

    _mode: FederatedAveraging
    _encoder: Any
    _functions: Any

    def __init__(self, model: keras.Model, stats: StatsCollector) -> None:
        """Prepares the training of a model; see `ChiefTraining`."""
        super().__init__(model, stats)
        self._mode.check_clients(self._workers)
        self._num_clients = clients = self._mode.num_clients(self._workers)
        self._encoder = ClientEncoder(self._strategy.policy, self._new_worker_variable, -(-clients // self._workers))
        self._num_buffers = self._mode.num_chosen(self._workers) + self._workers
        self._outstanding: dict[int, _ClientCall] = {}  # by worker
        self._data: ClientDatasets | None = None
        self._iterators: list[Any] = []
        self._server_optimizer: Any = None
        self._positions: Any = None  # by client, how many of its batches were trained on; a variable, to be saved
        self._drawn = np.zeros([clients], np.int64)  # the same: iterators are created in other threads

    @explains_lost_servers
    def abandon(self) -> None:
        """Does what the base class does; the clients' datasets then begin at the restored positions."""
        super().abandon()
        self._data = None
        self._discard_outstanding()

    def forget(self, name: str) -> None:
        """Does what the base class does; a model that was compiled again has a new optimizer of the servers, too."""
        super().forget(name)
        if name == "train":
            with self._strategy.scope():
                self._server_optimizer = self._mode.new_server_optimizer()
            with tf.device("/job:chief/device:CPU:0"):
                self._positions = tf.Variable(tf.zeros([self._num_clients], tf.int64), trainable=False)
            set_server_state(self._model, self._server_optimizer, self._positions)
            self._data = None
            self._discard_outstanding()

    def _discard_outstanding(self) -> None:
        # The numbers of rounds may begin again.
        self._outstanding = {
            worker: dataclasses.replace(client_call, round=_DISCARDED)
            for worker, client_call in self._outstanding.items()
        }

    def _prepared(self) -> Any:
        functions: Any = self._functions_of_model()
        if not self._is_prepared:
            reject_unsupported_clients(self._model, self._strategy.policy)
            super()._prepared()
            self._is_prepared = False  # until the slots are there, too: reading them may be interrupted
            with self._strategy.scope():
                if not self._server_optimizer.built:
                    self._server_optimizer.build(self._model.trainable_variables)
            functions.slots = InitialSlots(self._model.optimizer)
            self._is_prepared = True
        return functions

    def _new_functions(self) -> "ClientFunctions":
        buffers = GradientBuffers(self._num_buffers)
        arguments = (self._model, self._strategy, self._encoder, buffers, self._packing)
        return ClientFunctions(*arguments, server_optimizer=self._server_optimizer)

    def _finish_scheduled(self) -> None:
        # Not for clients: one that is late or lost may never end.
        self._scheduler.wait(lambda: not len(self._scheduler), self._collect)

    def _train_on_pending(self, functions: Any) -> None:
        batches, self._pending = self._pending, []
        data = batches[0].dataset if isinstance(batches[0], WorkerIterator) else batches[0]
        if not isinstance(data, ClientDatasets):
            raise ValueError(
                f"Clients train on their own data. Received: {type(data).__name__}. Expected: "
                "`fit(strategy.distribute_datasets_from_function(dataset_fn), steps_per_epoch=rounds)`, where "
                "`dataset_fn(input_context)` returns the data of the client `input_context.input_pipeline_id`."
            )
        if not data.is_of(self._strategy, self._num_clients):
            raise ValueError(
                f"These are the data of another strategy or mode. Received: data of {data.clients} clients. Expected: "
                f"data of {self._num_clients} clients, by `distribute_datasets_from_function` of the model's strategy."
            )
        self._use(data)
        number = self._next_number()
        # By client, so that rounding does not depend on who was first.
        done = dict(sorted(self._run_client_round(functions, number, self._wait_for_clients(number)).items()))
        for _, result in done.values():
            self._sums.add(result["metrics"], result["logs"])
        weights = sample_fractions([int(result["report"]["samples"]) for _, result in done.values()])
        buffers = [buffer for buffer, _ in done.values()]
        # Always as many: another number would be traced, and TensorFlow would send the new function to all workers and
        # wait for one that is frozen.
        missing = self._mode.num_chosen(self._workers) - len(buffers)
        buffers, weights = buffers + buffers[:1] * missing, weights + [0.0] * missing
        functions.update(tf.constant(buffers, tf.int32), tf.constant(weights, tf.float64))
        trained = [[client] for client in done]
        steps = tf.fill([len(done)], tf.constant(self._mode.local_steps, tf.int64))
        self._positions.assign(tf.tensor_scatter_nd_add(self._positions, trained, steps))
        self._drawn[:] = self._positions.numpy()
        self._stats.updates += 1

    def _use(self, data: ClientDatasets) -> None:
        if data is not self._data:
            if self._data is not None:  # otherwise the positions are zeros, or those of a checkpoint
                self._positions.assign(tf.zeros_like(self._positions))
            self._data, self._drawn = data, self._positions.numpy()
            self._iterators = data.create_iterators(self._drawn)

    # Rounds.

    def _wait_for_clients(self, number: int) -> list[int]:
        """Returns the chosen clients once enough workers are free."""
        mode, began = self._mode, time.monotonic()
        while True:
            self._settle()
            ready = [client for client in range(self._num_clients) if client % self._workers not in self._outstanding]
            chosen = chosen_clients(mode.seed, number, self._num_clients, ready, mode.num_chosen(self._workers))
            if len(chosen) >= mode.min_clients:
                return chosen
            self._pause(began, len(chosen), is_limited=True)

    def _run_client_round(self, functions: Any, number: int, chosen: list[int]) -> dict[int, tuple[int, Any]]:
        """Has the clients train; returns the buffer and the result of those that count, by client."""
        mode = self._mode
        began: float | None = None  # when all workers have their first client: the first call is traced
        used_buffers = {client_call.buffer for client_call in self._outstanding.values()}
        buffers = dict(
            zip(chosen, (buffer for buffer in range(self._num_buffers) if buffer not in used_buffers), strict=False)
        )
        queues: dict[int, deque[int]] = {}
        for client in chosen:
            queues.setdefault(client % self._workers, deque()).append(client)
        done: dict[int, tuple[int, Any]] = {}
        while True:
            for worker, queue in queues.items():
                if queue and worker not in self._outstanding:
                    client = queue.popleft()
                    self._outstanding[worker] = self._call(functions, client, buffers[client], number)
            began = time.monotonic() if began is None else began
            done |= self._settle(number)
            waiting = [
                worker
                for worker in queues
                if (client_call := self._outstanding.get(worker)) is not None and not client_call.call.is_lost
            ]
            is_late = mode.deadline_seconds is not None and time.monotonic() - began >= mode.deadline_seconds
            queued = any(queue and worker not in self._outstanding for worker, queue in queues.items())
            if len(done) >= mode.min_clients and (is_late or not (waiting or queued)):
                return done
            if not (waiting or queued) and not any(
                client_call.call.is_lost for client_call in self._outstanding.values()
            ):
                raise RuntimeError(
                    f"Too few clients have finite weights after a round. Received: {len(done)} of {len(chosen)} "
                    f"clients. Expected: at least min_clients={mode.min_clients}. Lower the learning rate of the "
                    "clients, clip their gradients, or look for wrong data."
                )
            self._pause(began, len(done), is_limited=is_late or not (waiting or queued))

    def _call(self, functions: Any, client: int, buffer: int, number: int) -> _ClientCall:
        slot, worker = divmod(client, self._workers)
        arguments = (self._iterators[slot], ClientInfo(number, client, slot, buffer).pack())
        call = call_on_worker(self._strategy.coordinator, worker, functions.train_client, arguments)
        return _ClientCall(call, client, buffer, number, time.monotonic())

    def _settle(self, number: int | None = None) -> dict[int, tuple[int, Any]]:
        """Removes the calls that have ended; returns those of round `number` that count."""
        counted_results = {}
        for worker, client_call in list(self._outstanding.items()):
            if client_call.call.is_done:
                del self._outstanding[worker]
                try:
                    result = self._packing.unpack(client_call.call.result())
                except tf.errors.OutOfRangeError as error:
                    raise ValueError(
                        f"The dataset of a client is empty. Received: no batch of client {client_call.client}. "
                        "Expected: at least one batch in what `dataset_fn` returns for each client."
                    ) from error
                except tf.errors.OpError:
                    if client_call.round == number:
                        raise
                    continue  # of a round that has ended without it
                report = {key: int(value) for key, value in result["report"].items()}
                counts = bool(report.pop("counts")) and client_call.round == number and report["samples"] > 0
                if client_call.round == number and not counts:
                    warnings.warn(
                        f"Client {client_call.client} is left out of round {number}: its weights are not finite. Lower "
                        "the learning rate of the clients, or look for wrong data.",
                        stacklevel=2,
                    )
                self._stats.add(report, counts=counts, scheduled_at=client_call.scheduled_at)
                if counts:
                    counted_results[client_call.client] = client_call.buffer, result
        return counted_results

    def _pause(self, began: float, ready: int, *, is_limited: bool) -> None:
        waited = time.monotonic() - began
        if is_limited and waited > self._mode.limit_seconds:
            raise RuntimeError(
                f"A round has waited for {waited:.0f} s. Received: {ready} clients. Expected: at least "
                f"min_clients={self._mode.min_clients}. Check the workers, or lower `min_clients`."
            )
        pause(waited, self.servers.check)


_numbers = itertools.count()


class ClientEncoder(GradientEncoder):
    """Encodes differences; each client has a separate state, in a variable of its worker.

    Attributes:
        slot: While a function is traced: the client's number on its worker, an int64 scalar.
        counts: While a function is traced: whether the difference counts; the state of one that does not is dropped.
    """

    slot: Any
    counts: Any

    def __init__(self, policy: Policy, new_worker_variable: Any, slots: int) -> None:
        """Creates an encoder for workers of at most `slots` clients; see `GradientEncoder`."""

        def new_variable_of_all(value: tf.Tensor) -> tf.Variable:
            return new_worker_variable(tf.stack([value] * slots))

        super().__init__(policy, new_variable_of_all)

    def read_state(self, path: str) -> dict[str, tf.Tensor]:
        """Returns the state of the client's compressor for the variable at `path`."""
        return {name: tf.gather(tensor, self.slot) for name, tensor in super().read_state(path).items()}

    def write_state(self, path: str, new_state: dict[str, tf.Tensor]) -> None:
        """Stores the state of the client's compressor for the variable at `path`."""
        merged = {}
        for name, states_of_slots in super().read_state(path).items():
            if name in new_state:
                value = tf.where(self.counts, new_state[name], tf.gather(states_of_slots, self.slot))
                merged[name] = tf.tensor_scatter_nd_update(states_of_slots, [[self.slot]], value[tf.newaxis])
        super().write_state(path, merged)


class ClientFunctions(WorkerFunctions):
    """The functions of a model under federated averaging.

    Attributes:
        slots: The initial ones of the model's optimizer, once that is built.
    """

    slots: InitialSlots
    _encoder: ClientEncoder
    _buffers: GradientBuffers

    def __init__(self, *arguments: Any, server_optimizer: Any) -> None:
        """Creates the functions with the arguments of `WorkerFunctions`. The server's optimizer is built."""
        super().__init__(*arguments)
        self._server_optimizer = server_optimizer
        self._name = f"tfdist/client/{next(_numbers)}"
        self.train_client = tf.function(self._train_client, autograph=False)

    def _train_client(self, iterator: Any, packed: tf.Tensor) -> Sequence[tf.Tensor]:
        info, strategy, encoder = ClientInfo.unpack(packed), self._strategy, self._encoder

        def run() -> dict[str, Any]:
            arguments = (strategy, self.slots, self._server_optimizer, self._name)
            result, counts = train(self._model, iterator, info, *arguments)
            encoder.slot, encoder.counts = info.slot, counts
            report = self._buffers.write(result, tf.cast(info.buffer, tf.int32), encoder)
            report["counts"] = tf.cast(counts, tf.int64)
            return {"report": report, "metrics": result.metrics, "logs": named_log_part(self._model, result.logs)}

        return self._run(run)
