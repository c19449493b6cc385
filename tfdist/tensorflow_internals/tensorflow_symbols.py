"""The private TensorFlow symbols that tfdist uses, each with its reason."""

from tfdist.private_symbols import private, private_members

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

private_members(
    {
        f"{_DISTRIBUTE}.mirrored_strategy:MirroredExtended": {
            "_use_merge_call": "decides between replica-context and merge-call reduction",
            "_make_collective_ops_with_fallbacks": "creates the cross-device operations",
            "_get_cross_device_ops": "chooses the cross-device operations of a value",
        },
        f"{_DISTRIBUTE}.mirrored_run:_MirroredReplicaContext": {
            "_merge_call": "runs the other replicas before it returns"
        },
        f"{_DISTRIBUTE}.collective_all_reduce_strategy:CollectiveAllReduceExtended": {
            "_use_merge_call": "as for MirroredExtended",
            "_reduce_to": "does not map over structures",
            "_initialize_strategy": "joins TensorFlow's cluster",
            "_initialize_local": "creates the devices of a process without a cluster",
            "_initialize_local_devices": "uses only one CPU device",
            "_num_replicas_in_sync": "multiplies the number of this worker's devices",
            "_get_replica_id_in_sync_group": "as for _num_replicas_in_sync",
            "_get_local_replica_id": "as for _num_replicas_in_sync",
            "_experimental_distribute_values_from_function": "as for _num_replicas_in_sync",
            "_get_variable_creator_initial_value": "broadcasts initial values by TensorFlow's cluster",
            "_gather_to_implementation": "chooses a group by the number of this worker's values",
            "_get_cross_device_ops": "as for _gather_to_implementation",
            "_make_input_context": "describes a worker's part of the data",
            "_input_workers_with_options": "the devices that data is moved to",
        },
        f"{_DISTRIBUTE}.distribute_lib:StrategyExtendedV2": {
            "_container_strategy": "the strategy of this implementation"
        },
        f"{_DISTRIBUTE}.distribute_lib:StrategyExtendedV1": {
            "_in_multi_worker_mode": "whether workers agree on an end"
        },
        f"{_DISTRIBUTE}.cross_device_ops:CollectiveAllReduce": {
            "_batch_all_gather": "traces a function for each gather",
            "_all_reduce": "reduces the tensors of one replica",
        },
        f"{_DISTRIBUTE}.cross_device_utils:CollectiveReplicaLauncher": {
            "_next_instance_key": "numbers the collectives",
            "_all_gather": "gathers tensors of equal shape",
            "_get_ordering_token": "decides whether collectives run one by one",
        },
        f"{_DISTRIBUTE}.parameter_server_strategy_v2:ParameterServerStrategyV2Extended": {
            "_create_variable": "colocates variables with others without counting their bytes",
            "_create_variable_round_robin": "places variables one after another, regardless of their size",
        },
        f"{_DISTRIBUTE}.one_device_strategy:OneDeviceExtended": {
            "_create_variable": "creates all variables on one device",
            "_update": "updates all variables on one device",
            "_call_for_each_replica": "enters its replica context",
            "_validate_colocate_with_variable": "rejects variables that were moved",
        },
        f"{_DISTRIBUTE}.coordinator.values:RemoteValueImpl": {
            "get": "its copy of an output, not its status, shows that a function ended"
        },
        f"{_DISTRIBUTE}.coordinator.cluster_coordinator:_CoordinatedClosureQueue": {
            "get": "returns the next function of a worker",
            "put": "adds a function",
            "put_back": "adds a function again whose worker was lost",
        },
        f"{_DISTRIBUTE}.coordinator.cluster_coordinator:Worker": {
            "_register_and_schedule_resource_closure": "schedules a function on one worker"
        },
        f"{_DISTRIBUTE}.values:PerReplica": {"_type_spec": "the type of a batch, which counts are added to"},
        f"{_DISTRIBUTE}.values:PerReplicaSpec": {"_to_components": "the tensors of a batch, which counts are added to"},
        f"{_DISTRIBUTE}.input_lib": {
            "_calculate_replicas_with_values": "lets all workers agree whether the data has ended"
        },
        f"{_DISTRIBUTE}.input_lib:DistributedIteratorBase": {
            "_get_next_no_partial_batch_handling": "raises the error at the end of the data"
        },
        f"{_DISTRIBUTE}.input_lib:DistributedDataset": {
            "_make_rebatch_fn": "sees the batch size of a dataset, but not beyond a function that is mapped"
        },
        "tensorflow:data.Dataset": {
            "_inputs": "the datasets that a dataset reads",
            "_functions": "the functions that a dataset calls",
        },
        "tensorflow.python.checkpoint.checkpoint:TrackableSaver": {
            "save": "uses temporary names that are the same in all processes"
        },
        "tensorflow.python.saved_model.save": {"save_and_return_nodes": "copies assets to their final names"},
        "tensorflow.python.ops.script_ops:FuncRegistry": {"__call__": "passes their results on without a copy"},
        "tensorflow.python.eager.context:Context": {
            "configure_coordination_service": (
                "takes a worker that was silent for 10 s for lost, also while a slow link is busy"
            ),
        },
        "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function": {
            "_clone": "calls all replicas in a function with the options of the given one"
        },
        "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction": {
            "_call_flat": "calls a function with other variables than those for which it was traced"
        },
        "tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies": {
            "run_independently": (
                "a function orders all its stateful operations one after another, also those of different stages and "
                "replicas"
            ),
        },
        "tensorflow.python.framework.func_graph:FuncGraph": {
            "_create_op_internal": "creates an operation, or returns an equal one",
            "outer_graph": "the graph of the step around a branch",
        },
        "tensorflow.python.framework.ops:Graph": {
            "_device_functions_outer_to_inner": "the device of the next operation",
            "_current_control_dependencies": "what the next operation waits for",
            "colocate_with": "makes `_colocation_stack`, the next operation's place",
        },
        "tensorflow.python.framework.ops:Operation": {
            "_add_control_inputs": "orders the operations of a replica that its function leaves unordered",
            "_set_device": "the device of an operation that was created",
        },
        "tensorflow.python.framework.ops:_DefaultGraphStack": {"reset": "is left out within a scope"},
    }
)
