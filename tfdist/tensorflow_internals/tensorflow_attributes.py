"""The private attributes of TensorFlow's objects that tfdist uses, each with its reason and a small object with it.

Importing this creates nothing. `check_attributes` does, in the canaries of untested versions and in the tests.
"""

from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private, private_attributes
from tfdist.tensorflow_internals.cluster_coordinator import CoordinatorQueue
from tfdist.tensorflow_internals.tensorflow_symbols import (
    CollectiveAllReduce,
    CollectiveReplicaLauncher,
    FuncGraph,
    context,
    gradient_registry,
)

_DISTRIBUTE = "tensorflow.python.distribute"
_INPUT = f"{_DISTRIBUTE}.input_lib"
_COORDINATOR = f"{_DISTRIBUTE}.coordinator"

_RemoteValue = private(f"{_COORDINATOR}.values:RemoteValueImpl", "the result of a scheduled function")
_PerReplica = private(f"{_DISTRIBUTE}.values:PerReplica", "holds the parts of a batch")


def _mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0"])


def _operations() -> Any:
    return CollectiveAllReduce(["CPU:0"], 1, tf.distribute.experimental.CommunicationOptions())


def _launcher() -> Any:
    operations = _operations()
    options = tf.distribute.experimental.CommunicationOptions()
    return CollectiveReplicaLauncher(1, 1, operations._collective_keys, "CPU:0", options)


def _dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tf.zeros([2])).batch(1)


def _distributed() -> Any:
    return _mirrored().experimental_distribute_dataset(_dataset())


private_attributes(
    "tensorflow:Variable()",
    {
        "_unique_id": "the number of a variable, which a copy and its original share",
        "_shared_name": "the name under which `tf.train.Checkpoint` knows a variable",
    },
    lambda: tf.Variable(0.0),
)
private_attributes(
    "tensorflow:function()",
    {"_jit_compile": "whether XLA compiles it", "_autograph": "whether AutoGraph converts it"},
    lambda: tf.function(lambda: 0),
)
private_attributes(
    "tensorflow.python.framework.func_graph:FuncGraph()",
    {"_colocation_stack": "the place of the next operation"},
    lambda: FuncGraph("attributes"),
)
private_attributes(
    "tensorflow.python.framework.ops:gradient_registry()",
    {"_registry": "releases the gradients of graphs that are finished"},
    lambda: gradient_registry,
)
private_attributes(
    "tensorflow.python.eager.context:context()",
    {
        "_initialized": "whether devices are in use, after which they cannot be configured",
        "_collective_ops_server_def": "whether this process has joined a cluster",
        "_seed": "the global seed, which has no public getter",
    },
    context,
)
private_attributes("tensorflow:data.Dataset()", {"_variant_tensor": "the device of a dataset"}, _dataset)
private_attributes(
    "tensorflow:data.Dataset.batch()", {"_batch_size": "the size of batches"}, lambda: _dataset().batch(1)
)
private_attributes(
    "tensorflow:data.Dataset.from_tensors()",
    {"_tensors": "the data that a pipeline holds in memory"},
    lambda: tf.data.Dataset.from_tensors(0),
)
private_attributes(
    "tensorflow:data.Dataset.shuffle()",
    {
        "_seed": "the seeds of a shuffle",
        "_seed2": "as for `_seed`",
        "_reshuffle_each_iteration": "whether each epoch has another order",
    },
    lambda: _dataset().shuffle(2),
)
private_attributes(
    "tensorflow:data.Dataset.map(num_parallel_calls=2)()",
    {"_deterministic": "whether the order of elements may differ between runs"},
    lambda: _dataset().map(lambda x: x, num_parallel_calls=2),
)
private_attributes(
    "tensorflow.python.data.ops.structured_function:StructuredFunctionWrapper()",
    {"_func": "the Python function that a dataset calls"},
    lambda: _dataset().map(lambda x: x)._functions()[0],
)
private_attributes(
    f"{_INPUT}:DistributedDataset()",
    {
        "_original_dataset": "the dataset before it was distributed",
        "_cloned_datasets": "the datasets of workers",
        "_cardinality": "whether the data ends, which a step is traced with",
        "_element_spec": "the types of batches; `element_spec` drops static sizes on several workers",
        "_enable_get_next_as_optional": "whether an iterator asks for the end of the data",
        "_input_workers": "the devices that data is moved to",
        "_options": "rebuilds the dataset at a position",
        "_replica_order": "as for `_options`",
        "_strategy": "as for `_options`",
    },
    _distributed,
)
private_attributes(
    f"{_INPUT}:DistributedDatasetsFromFunction()",
    {
        "_datasets": "the datasets of workers",
        **dict.fromkeys(
            "_cardinality _element_spec _enable_get_next_as_optional _input_workers _options _replica_order "
            "_strategy".split(),
            "as for DistributedDataset",
        ),
    },
    lambda: _mirrored().distribute_datasets_from_function(lambda _: _dataset()),
)
private_attributes(
    f"{_INPUT}:DistributedIterator()",
    {
        "_element_spec": "the types of batches",
        "_enable_get_next_as_optional": "whether it asks for the end of the data",
        "_input_workers": "the devices that data is moved to",
        "_iterators": "the iterators of workers",
        "_strategy": "whose replicas draw batches",
    },
    lambda: iter(_distributed()),
)
private_attributes(
    f"{_DISTRIBUTE}.values:PerReplica()", {"_values": "the parts of a batch"}, lambda: _PerReplica([tf.zeros([])])
)
private_attributes(
    f"{_DISTRIBUTE}.values:PerReplicaSpec()",
    {"_value_specs": "the types of the parts of a batch"},
    lambda: _PerReplica([tf.zeros([])])._type_spec,
)
private_attributes(
    f"{_DISTRIBUTE}.mirrored_strategy:MirroredExtended()",
    {"_collective_ops": "the cross-device operations, which are replaced"},
    lambda: _mirrored().extended,
)
private_attributes(
    f"{_DISTRIBUTE}.collective_all_reduce_strategy:CollectiveAllReduceExtended()",
    {
        **dict.fromkeys(
            "_cluster_spec _id_in_cluster _is_chief _num_workers _task_id _task_type".split(),
            "is set for a strategy whose workers TensorFlow does not connect",
        ),
        "_collective_key_base": "differs between strategies of a process",
        "_communication_options": "whether NCCL was asked for",
        "_cross_device_ops": "is replaced by operations that reduce in replicas",
        "_host_cross_device_ops": "as for `_cross_device_ops`",
        "_local_device_type": "is compared between workers",
        "_num_devices_per_worker": "is exchanged between workers, as they may differ",
    },
    lambda: tf.distribute.MultiWorkerMirroredStrategy().extended,
)
private_attributes(
    f"{_DISTRIBUTE}.one_device_strategy:OneDeviceExtended()",
    {"_device": "the device of a placed model's replica"},
    lambda: tf.distribute.OneDeviceStrategy("CPU:0").extended,
)
private_attributes(
    f"{_DISTRIBUTE}.cross_device_ops:CollectiveAllReduce()",
    {
        "_canonicalize_devices": "creates operations like TensorFlow's",
        "_collective_keys": "numbers groups",
        "_devices": "the devices that it reduces over",
        "_group_size": "the number of replicas",
        "_options": "the communication options",
    },
    _operations,
)
private_attributes(
    f"{_DISTRIBUTE}.cross_device_utils:CollectiveReplicaLauncher()",
    {
        "_device": "the device of a collective",
        "_group_key": "the group of a collective that TensorFlow does not launch",
        "_group_size": "as for `_group_key`",
        "_options": "as for `_group_key`",
    },
    _launcher,
)
private_attributes(
    f"{_COORDINATOR}.values:RemoteValueImpl()",
    {
        "_error": "why a scheduled function failed",
        "_fetched_tensors": "its result, without waiting",
        "_has_fetched_to_local": "whether its result was copied here, after which it does not run again",
        "_status": "whether its worker was lost",
        "_type_spec": "with what iterator a function is traced",
    },
    lambda: _RemoteValue(None, None),
)
private_attributes(
    f"{_COORDINATOR}.cluster_coordinator:_CoordinatedClosureQueue()",
    {
        "_closures_queued_condition": "wakes the worker that a function is for",
        "_queue": "the functions that wait",
        "_queue_free_slot_condition": "tells that a function was removed",
        "_queue_lock": "is held while one is chosen",
        "_should_process_closures": "whether the coordinator ends",
        "_tagged_queue": "the functions of one worker",
    },
    CoordinatorQueue,
)
# Of a cluster: only a test creates one.
private_attributes(
    f"{_DISTRIBUTE}.parameter_server_strategy_v2:ParameterServerStrategyV2Extended()",
    {
        "_allow_run_without_coordinator": "allows the chief to use `strategy.run` itself",
        "_num_ps": "the number of servers that variables are placed on",
    },
)
private_attributes(
    "tensorflow:distribute.coordinator.ClusterCoordinator()", {"_cluster": "its queue, workers and failure handler"}
)
private_attributes(
    f"{_COORDINATOR}.cluster_coordinator:WorkerPreemptionHandler()",
    {"_cluster_update_lock": "is held by a coordinator that connects again, as only one may"},
)
private_attributes(
    f"{_COORDINATOR}.cluster_coordinator:Worker()",
    {
        "_resource_remote_value_refs": "what is created again on a lost worker, which grows with every function",
        "_resource_tracking_lock": "is held while it is shortened",
    },
)
