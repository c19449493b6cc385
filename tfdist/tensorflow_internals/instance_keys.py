"""The instance keys that match the collectives of different replicas: drawn in the graph, and reused."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

# TensorFlow numbers eager collectives from 100 upward. Above these are two ranges of keys that are used alternately,
# then keys that are used once.
_FIRST_KEY = 1 << 24
_RANGE = 1 << 24
_RANGES = 2
_FIRST_KEY_USED_ONCE = _FIRST_KEY + _RANGES * _RANGE
_KEYS_USED_ONCE = 1 << 30  # after that number they repeat


class InstanceKeys:
    """Draws the instance keys of one replica's collectives when they run.

    Stock TensorFlow feeds the keys of a function's collectives when the function is called. It cannot feed a nested
    function in a `tf.while_loop` (`steps_per_execution` fails: "You must feed a value for placeholder tensor"), a loop
    would use one key for all its iterations, and every collective of every step has a new key, for which the workers
    must agree on the members again: one more round trip, and a record that TensorFlow never deletes.

    Here collectives of known shapes reuse their keys. TensorFlow records kind, dtype and shape with a key. So a key
    belongs to a *site*: kind, dtype, shape, and the number of equal ones before it in its graph (of a function, a
    branch or the body of a loop). Each replica has a table that numbers the sites in the order of their first
    execution. All replicas execute the same sites in the same order, regardless of when each traced its graphs, so
    their tables are equal.

    Two collectives of a replica never use a key at the same time: sites of one graph differ, and the start of a graph
    waits for all collectives that the replica launched before. A collective is complete when its peers have received
    everything, so a later one with the same key cannot be mistaken for it. The two ranges are a second safeguard.
    """

    def __init__(self, host: str, token: Any) -> None:
        """Creates the table on the device `host`; `token` is the ordering token of the replica's collectives."""
        self._host = host
        self._token = token
        with tf.init_scope(), tf.device(host):
            self._graphs_executed = ResourceVariable(0, dtype=tf.int32, trainable=False, name="collective_graphs")
            self._used_once = ResourceVariable(0, dtype=tf.int32, trainable=False, name="collectives_of_any_shape")
            self._numbers = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int32, default_value=-1)
        self._graphs: WeakKeyDictionary[tf.Graph, _GraphSites] = WeakKeyDictionary()
        self._variables: list[tf.Variable] = []  # TensorFlow may keep a function longer than its graph

    def next(self, signature: str | None) -> tf.Tensor:
        """Returns the key, an int32 scalar, of the next collective that is being traced.

        `signature` is its kind, dtype and shape; `None` if another replica, which has traced with other data, may know
        the shape when this one does not.
        """
        if signature is None:
            with tf.device(self._host):
                used = self._used_once.assign_add(1, read_value=True)
                return _FIRST_KEY_USED_ONCE + tf.math.floormod(used, _KEYS_USED_ONCE)
        graph = tf.compat.v1.get_default_graph()
        if graph not in self._graphs:
            self._graphs[graph] = self._new_graph()
        sites = self._graphs[graph]
        position = sites.add(signature)
        with tf.device(self._host):
            return graph.get_tensor_by_name(sites.keys)[position]

    @classmethod
    def equalize(cls, replicas: "Sequence[InstanceKeys]") -> None:
        """Makes the replicas of one process draw equal keys again. Call this while a function of them is traced.

        A step that fails on one replica ends the others' between two graphs, such as the branches of conditions: the
        replicas have then executed different numbers of them.
        """
        if len(replicas) < 2:
            return
        with tf.device(replicas[0]._host):
            counts = tf.stack([replica._counts() for replica in replicas])
            most = tf.reduce_max(counts, axis=0)
            tf.cond(tf.reduce_all(counts == most), lambda: None, lambda: cls._repair(replicas, most))

    def _counts(self) -> tf.Tensor:
        sites = tf.cast(self._numbers.size(), tf.int32)
        return tf.stack([self._graphs_executed.read_value(), self._used_once.read_value(), sites])

    @staticmethod
    def _repair(replicas: "Sequence[InstanceKeys]", counts: tf.Tensor) -> None:
        for replica in replicas:
            replica._graphs_executed.assign(counts[0])
            replica._used_once.assign(counts[1])
            for other in replicas:  # the shorter table is the beginning of the longer one
                if other is not replica:
                    replica._numbers.insert(*other._numbers.export())

    def _new_graph(self) -> "_GraphSites":
        with tf.init_scope(), tf.device(self._host):
            hashes = ResourceVariable(tf.zeros([0], tf.int64), shape=[None], trainable=False, name="collective_sites")
        self._variables.append(hashes)
        # Not `read_value`, which adds a second operation.
        token = tf.raw_ops.ReadVariableOp(resource=self._token.handle, dtype=self._token.dtype)
        with tf.control_dependencies([token]), tf.device(self._host):
            turn = tf.math.floormod(self._graphs_executed.assign_add(1, read_value=True), _RANGES)
            sites = hashes.read_value()  # complete when the graph runs
            numbers = self._numbers.lookup(sites)
            is_new = tf.cast(numbers < 0, tf.int32)
            new_numbers = tf.cast(self._numbers.size(), tf.int32) + tf.cumsum(is_new, exclusive=True)
            numbers = tf.where(numbers < 0, new_numbers, numbers)
            with tf.control_dependencies([self._numbers.insert(sites, numbers)]):
                keys = tf.add(numbers, _FIRST_KEY + turn * _RANGE)
        return _GraphSites(hashes, keys.name)


class _GraphSites:
    """The sites of one graph: their hashes, in a variable that grows during tracing, and the tensor of keys."""

    def __init__(self, hashes: tf.Variable, keys: str) -> None:
        self.keys = keys
        self._hashes = hashes
        self._all: list[int] = []
        self._of_signature: Counter[str] = Counter()

    def add(self, signature: str) -> int:
        """Adds a site; returns its position."""
        site = f"{signature} {self._of_signature[signature]}"
        self._of_signature[signature] += 1
        digest = hashlib.blake2b(site.encode(), digest_size=8).digest()
        self._all.append(int.from_bytes(digest, "little", signed=True))
        with tf.init_scope():
            self._hashes.assign(self._all)
        return len(self._all) - 1
