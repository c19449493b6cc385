"""The private TensorFlow symbols that tfdist uses, each with its reason."""

from tfdist.private_symbols import private

_DISTRIBUTE = "tensorflow.python.distribute"

CollectiveAllReduce = private(
    f"{_DISTRIBUTE}.cross_device_ops:CollectiveAllReduce",
    "the cross-device operations that MirroredStrategy and MultiWorkerMirroredStrategy reduce with",
)
CollectiveReplicaLauncher = private(
    f"{_DISTRIBUTE}.cross_device_utils:CollectiveReplicaLauncher",
    "launches one collective operation on one replica, in a function or eagerly",
)
regroup = private(f"{_DISTRIBUTE}.distribute_utils:regroup", "makes one distributed value of the replicas' values")
simple_broadcast = private(
    f"{_DISTRIBUTE}.cross_device_ops:simple_broadcast", "copies the result of a reduction to its destinations"
)
MirroredExtended = private(
    f"{_DISTRIBUTE}.mirrored_strategy:MirroredExtended", "the implementation behind MirroredStrategy"
)
CollectiveAllReduceExtended = private(
    f"{_DISTRIBUTE}.collective_all_reduce_strategy:CollectiveAllReduceExtended",
    "the implementation behind MultiWorkerMirroredStrategy",
)
Mirrored = private(f"{_DISTRIBUTE}.values:Mirrored", "marks a value as equal on all replicas")
ResourceVariable = private(
    "tensorflow.python.ops.resource_variable_ops:ResourceVariable", "a plain variable, regardless of the strategy scope"
)
context = private("tensorflow.python.eager.context:context", "the process-wide eager context: server, key-value store")

FuncGraph = private("tensorflow.python.framework.func_graph:FuncGraph", "the graph of a function")
gradient_registry = private(
    "tensorflow.python.framework.ops:gradient_registry",
    "holds the gradient of each call of a `tf.custom_gradient`, with its graph",
)
may_be_recorded = private("tensorflow.python.eager.record:could_possibly_record", "whether a gradient tape is active")

ParameterServerExtended = private(
    f"{_DISTRIBUTE}.parameter_server_strategy_v2:ParameterServerStrategyV2Extended",
    "the implementation behind ParameterServerStrategy",
)
dispatch_context = private(
    f"{_DISTRIBUTE}.coordinator.coordinator_context:get_current_dispatch_context", "the worker that runs a function"
)
record_operation = private(
    "tensorflow.python.eager.record:record_operation", "gives a pulled and cast value its variable's gradient"
)
stop_recording = private("tensorflow.python.eager.record:stop_recording", "keeps that cast off the tape")
variable_accessed = private("tensorflow.python.eager.tape:variable_accessed", "puts its variable on the tape")

OneDeviceExtended = private(
    f"{_DISTRIBUTE}.one_device_strategy:OneDeviceExtended", "the implementation of a strategy with one replica"
)
OneDeviceReplicaContext = private(
    f"{_DISTRIBUTE}.one_device_strategy:_OneDeviceReplicaContext", "copies gradients to the device of the replica"
)
UpdateContext = private(f"{_DISTRIBUTE}.distribute_lib:UpdateContext", "the context of the update of a variable")
resolved_device = private(f"{_DISTRIBUTE}.device_util:resolve", "the full name of a device, as variables on it have it")

# Overridden private methods: if TensorFlow renamed one, the override would have no effect.
for _method, _why in {
    "mirrored_strategy:MirroredExtended._use_merge_call": "decides between replica-context and merge-call reduction",
    "mirrored_strategy:MirroredExtended._make_collective_ops_with_fallbacks": "creates the cross-device operations",
    "mirrored_strategy:MirroredExtended._get_cross_device_ops": "chooses the cross-device operations of a value",
    "collective_all_reduce_strategy:CollectiveAllReduceExtended._use_merge_call": "as for MirroredExtended",
    "collective_all_reduce_strategy:CollectiveAllReduceExtended._reduce_to": "does not map over structures",
    "collective_all_reduce_strategy:CollectiveAllReduceExtended._initialize_local_devices": "uses only one CPU device",
    "cross_device_ops:CollectiveAllReduce._batch_all_gather": "traces a function for each gather",
    "cross_device_ops:CollectiveAllReduce._all_reduce": "reduces the tensors of one replica",
    "cross_device_utils:CollectiveReplicaLauncher._next_instance_key": "numbers the collectives",
    "cross_device_utils:CollectiveReplicaLauncher._all_gather": "gathers tensors of equal shape",
    "cross_device_utils:CollectiveReplicaLauncher._get_ordering_token": "decides whether collectives run one by one",
    "parameter_server_strategy_v2:ParameterServerStrategyV2Extended._create_variable": (
        "colocates variables with others without counting their bytes"
    ),
    "parameter_server_strategy_v2:ParameterServerStrategyV2Extended._create_variable_round_robin": (
        "places variables one after another, regardless of their size"
    ),
    "one_device_strategy:OneDeviceExtended._create_variable": "creates all variables on one device",
    "one_device_strategy:OneDeviceExtended._update": "updates all variables on one device",
    "one_device_strategy:OneDeviceExtended._call_for_each_replica": "enters its replica context",
    "one_device_strategy:OneDeviceExtended._validate_colocate_with_variable": "rejects variables that were moved",
    "coordinator.values:RemoteValueImpl.get": "its copy of an output, not its status, shows that a function ended",
}.items():
    private(f"{_DISTRIBUTE}.{_method}", _why)
for _method, _why in {
    "_num_replicas_in_sync": "multiplies the number of this worker's devices",
    "_get_replica_id_in_sync_group": "as for _num_replicas_in_sync",
    "_get_local_replica_id": "as for _num_replicas_in_sync",
    "_experimental_distribute_values_from_function": "as for _num_replicas_in_sync",
    "_get_variable_creator_initial_value": "broadcasts initial values by TensorFlow's cluster",
    "_gather_to_implementation": "chooses a group by the number of this worker's values",
    "_get_cross_device_ops": "as for _gather_to_implementation",
    "_make_input_context": "describes a worker's part of the data",
    "_input_workers_with_options": "the devices that data is moved to",
}.items():
    private(f"{_DISTRIBUTE}.collective_all_reduce_strategy:CollectiveAllReduceExtended.{_method}", _why)
