"""What a kind of strategies does where Keras and TensorFlow have no hook; the patches of the internals ask for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

_Found = TypeVar("_Found")


class UpdateHooks(NamedTuple):
    """How optimizers update.

    Attributes:
        update: Takes the `OptimizerUpdate` and the gradients of a replica, and runs the update.
        together: Takes a function, gradients, and for each gradient whether it is a new value of its variable instead;
            calls the function once with the gradients of all micro-batches.
        build: Takes an optimizer that is not built yet, and its variables; if it does not build it, Keras does.
    """

    update: Callable[[Any, list[Any]], None]
    together: Callable[[Callable[[list[Any]], None], list[Any], list[bool]], None]
    build: Callable[[Any, list[Any]], None] = lambda optimizer, variables: None


@dataclass(frozen=True, kw_only=True)
class StrategyHooks:
    """What strategies of one kind do. Each default leaves Keras and TensorFlow as they are.

    The first seven take nothing: they ask the step that is running. Most others take the strategy first.

    Attributes:
        current_step: Returns the `LossStep` by which losses are scaled; `None` outside of a step.
        compiles_calls: Whether XLA compiles the calls of layers and losses here. `None`: Keras compiles whole steps.
        scope_of_step: Returns the `keras.StatelessScope` in which a step runs, if there is one. It provides the values
            of variables and collects their updates, so they enter and leave what is compiled as tensors.
        is_recomputed: Whether a rematerialized function is computed again, or simply called; `None`: as Keras does.
        has_samples: Whether this replica has samples, a bool scalar if that is not known yet; `None` outside of a step.
        keep_state: Notes the Python state of the replica that runs; returns a function that restores it.
        part: Returns the number of this replica, or of its micro-batch among those of all replicas.
        optimizers: How optimizers update that were created under the strategy.
        sharding: Returns what plans and gathers split slots, or `None` for whole slots.
        has_copies: Whether each replica has a copy of a variable; statements outside of the replicas use the first.
        are_weights_apart: Whether no process has all weights, so that files are written layer by layer, and XLA does
            not compile whole predictions.
        split_rows: Takes an input, too; returns it with its rows distributed over the replicas.
        keeps_order: Whether replicas' parts of a batch are in the order of the replicas.
        agree_on_batches: Takes this worker's number of batches, too (`None`: unknown); returns that of all.
        carry_counts: Takes a distributed dataset and this worker's number of batches, too; returns the dataset to use.
        begin_epoch: Takes whether an epoch is one of training, too, and whether all workers know its number of steps,
            so that none has to ask whether the others' data has ended.
        end_epoch: Takes whether the loop was one of training that no exception has ended, too.
        mean_of_workers: Takes numbers that only this worker has computed, too; returns those for all workers. `None`:
            all workers have the same.
        ends_are_known: Returns a bool variable: whether as many steps are made on all workers as the one with most data
            has batches, and no totals are needed. `None`: workers ask each other.
        before_step: Called before each execution of steps.
        on_error: Takes the error, too, before an exception ends an epoch.
        at_end: Takes whether the loop that ends is one of training, too.
        local_values: Returns a context in which the strategy's `reduce` returns a local value unchanged.
        sent_bytes: Returns the bytes of gradients that this process has sent, if counted. `None`: Keras' progress bar.
        training: Takes a model; returns what trains it: its `train`, `test` and `predict` are the functions of `fit`.
        read_metrics: Takes a function that reads the results of metrics outside of a step, too, and calls it.
        reset_metrics: Takes a model, too, whose metrics are reset.
        fit_callbacks: Returns callbacks that a `fit` has besides those of the user.
        step_function: Takes a model, "train", "test" or "predict", and Keras' function of `fit`; returns what to use.
        create: Takes a `NewValue`, too; returns what holds the value of a new Keras variable, or `None`.
        look_up: Takes the shards of a table, and ids; returns the rows, or `None` for Keras' own lookup.
        num_shards: Takes the shape of a new table, too; returns into how many shards to split its rows.
    """

    current_step: Callable[[], Any] = lambda: None
    compiles_calls: Callable[[], bool] | None = None
    scope_of_step: Callable[[], Any] = lambda: None
    is_recomputed: Callable[[], bool | None] = lambda: None
    has_samples: Callable[[], Any] = lambda: None
    keep_state: Callable[[], Callable[[], None] | None] = lambda: None
    part: Callable[[], Any] | None = None
    optimizers: UpdateHooks | None = None
    sharding: Callable[[Any], Any] = lambda strategy: None
    has_copies: bool = False
    are_weights_apart: Callable[[Any], bool] = lambda strategy: False
    split_rows: Callable[[Any, Any], Any] = lambda strategy, x: x
    keeps_order: Callable[[Any], bool] = lambda strategy: False
    agree_on_batches: Callable[[Any, int | None], int | None] = lambda strategy, batches: batches
    carry_counts: Callable[[Any, Any, int | None], Any] = lambda strategy, dataset, batches: dataset
    begin_epoch: Callable[[Any, bool, bool], None] = lambda strategy, is_training, knows_end: None
    end_epoch: Callable[[Any, bool], None] = lambda strategy, has_trained: None
    mean_of_workers: Callable[[Any, list[Any]], list[float] | None] = lambda strategy, numbers: None
    ends_are_known: Callable[[Any], Any] = lambda strategy: None
    before_step: Callable[[Any], None] = lambda strategy: None
    on_error: Callable[[Any, BaseException], None] = lambda strategy, error: None
    at_end: Callable[[Any, bool], None] = lambda strategy, is_training: None
    local_values: Callable[[Any], AbstractContextManager[Any]] = lambda strategy: nullcontext()
    sent_bytes: Callable[[Any], int | None] | None = None
    training: Callable[[Any], Any] | None = None
    read_metrics: Callable[[Any, Callable[[], Any]], Any] = lambda strategy, read: read()
    reset_metrics: Callable[[Any, Any], None] = lambda strategy, model: None
    fit_callbacks: Callable[[Any], list[Any]] = lambda strategy: []
    step_function: Callable[[Any, Any, str, Any], Any] = lambda strategy, model, name, function: function
    create: Callable[[Any, Any], Any] | None = None
    look_up: Callable[[Any, Any], Any] | None = None
    num_shards: Callable[[Any, tuple[int, int]], int] = lambda strategy, shape: 1


_STOCK = StrategyHooks()
_hooks: dict[type, StrategyHooks] = {}


def register_hooks(strategy_class: type, hooks: StrategyHooks) -> None:
    """Gives all strategies of a class their hooks."""
    _hooks[strategy_class] = hooks


def hooks_of(strategy: Any) -> StrategyHooks:
    """Returns the hooks of a strategy's most specific registered class.

    Strategies of TensorFlow, and `None`, have hooks without effect.
    """
    return next((_hooks[kind] for kind in strategy.__class__.__mro__ if kind in _hooks), _STOCK)


def has_hooks(strategy: Any) -> bool:
    """Whether a strategy is one of tfdist's."""
    return hooks_of(strategy) is not _STOCK


def of_running_step(ask: Callable[[StrategyHooks], _Found | None]) -> _Found | None:
    """Returns the first result of `ask(hooks)`, of any kind of strategies, that is not `None`: one step runs alone."""
    return next((result for hooks in tuple(_hooks.values()) if (result := ask(hooks)) is not None), None)
