"""What local updates need when a training is saved and restored; nothing under other strategies."""

from typing import Any

from tfdist.keras_internals.model_state import updating_optimizers
from tfdist.training.strategy_protocol import training_strategy


def create_anchors(model: Any) -> None:
    """Creates the variables of local updates, which the first update would create."""
    if (updates := training_strategy(model.distribute_strategy).local_updates) is not None:
        updates.prepare(updating_optimizers(model))


def complete_exchanges(strategy: Any) -> None:
    """Waits for exchanges that are under way, which change residuals and whose sums are saved."""
    if (updates := training_strategy(strategy).local_updates) is not None:
        updates.hold()


def resume_local_updates(strategy: Any, *, same_workers: bool) -> None:
    """Continues with restored variables; on other workers from the last exchange."""
    if (updates := training_strategy(strategy).local_updates) is not None:
        updates.resume(same_workers=same_workers)
