"""The TensorFlow functions of federated averaging: a client's part of a round, and the update of the servers."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression import Policy
from tfdist.keras_internals.local_copies import InitialSlots
from tfdist.parameter_server.client_training import ClientInfo, train
from tfdist.parameter_server.gradient_buffers import GradientBuffers
from tfdist.parameter_server.gradient_push import GradientEncoder
from tfdist.parameter_server.result_packing import ResultPacking
from tfdist.parameter_server.step_results import named_log_part
from tfdist.parameter_server.worker_functions import WorkerFunctions

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
        """Stores it."""
        merged = {}
        for name, every in super().read_state(path).items():
            if name in new_state:
                value = tf.where(self.counts, new_state[name], tf.gather(every, self.slot))
                merged[name] = tf.tensor_scatter_nd_update(every, [[self.slot]], value[tf.newaxis])
        super().write_state(path, merged)


class ClientFunctions(WorkerFunctions):
    """The functions of a model under federated averaging."""

    def __init__(
        self,
        model: keras.Model,
        strategy: Any,
        encoder: ClientEncoder,
        buffers: GradientBuffers,
        packing: ResultPacking,
        server_optimizer: Any,
    ) -> None:
        """Creates the functions; see `WorkerFunctions`.

        Args:
            model: Compiled and built.
            strategy: The model's ParameterServerStrategy.
            encoder: Encodes differences.
            buffers: Where clients write them.
            packing: Packs what the functions return.
            server_optimizer: What applies their mean. It is built.
        """
        super().__init__(model, strategy, encoder, buffers, packing)
        self._client_encoder, self._client_buffers = encoder, buffers
        self._server_optimizer = server_optimizer
        self._slots: InitialSlots | None = None
        self._name = f"tfdist/client/{next(_numbers)}"
        self.train_client = tf.function(self._train_client, autograph=False)

    def prepare(self) -> None:
        """Reads the initial slots of the model's optimizer, which is built. Call this outside of functions."""
        if self._slots is None:
            self._slots = InitialSlots(self._model.optimizer)

    def _train_client(self, iterator: Any, packed: tf.Tensor) -> Sequence[tf.Tensor]:
        info, slots = ClientInfo.unpack(packed), self._slots
        if slots is None:
            raise RuntimeError("the functions were not prepared")
        strategy, encoder = self._strategy, self._client_encoder

        def run() -> dict[str, Any]:
            result, counts = train(
                self._model,
                iterator,
                info,
                strategy.mode,
                strategy.mode.num_clients(strategy.num_workers),
                slots,
                self._server_optimizer,
                strategy.pull_dtype,
                self._name,
            )
            encoder.slot, encoder.counts = info.slot, counts
            report = self._client_buffers.write(result, tf.cast(info.buffer, tf.int32), encoder)
            report["counts"] = tf.cast(counts, tf.int64)
            return {"report": report, "metrics": result.metrics, "logs": named_log_part(self._model, result.logs)}

        return self._run(run)
