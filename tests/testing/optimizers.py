"""The optimizers that tests train with, by name. Each is created with further arguments of its inner optimizer."""

from keras import optimizers


def everything(rate=0.1, **arguments):
    """AdamW with a schedule, decay, clipping and averages."""
    return optimizers.AdamW(
        optimizers.schedules.ExponentialDecay(rate, 2, 0.9),
        weight_decay=0.1,
        global_clipnorm=0.2,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=2,
        **arguments,
    )


def scaled(optimizer):
    """Scales the loss; the scale grows in the second update."""
    return optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10, dynamic_growth_steps=2)


OPTIMIZERS = {
    "momentum": lambda **more: optimizers.SGD(0.1, momentum=0.9, nesterov=True, **more),
    "adam": lambda **more: optimizers.Adam(0.01, amsgrad=True, **more),
    "adamw": lambda **more: optimizers.AdamW(0.01, weight_decay=0.1, **more),
    "adadelta": lambda **more: optimizers.Adadelta(0.1, **more),
    "adagrad": lambda **more: optimizers.Adagrad(0.1, **more),
    "adamax": lambda **more: optimizers.Adamax(0.01, **more),
    "lion": lambda **more: optimizers.Lion(0.01, **more),
    "rmsprop": lambda **more: optimizers.RMSprop(0.01, momentum=0.5, centered=True, **more),
    "clipnorm": lambda **more: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05, **more),
    "global_clipnorm": lambda **more: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.2, **more),
    "clipvalue": lambda **more: optimizers.SGD(0.1, momentum=0.9, clipvalue=0.01, **more),
    "averages": lambda **more: optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9, **more),
    "loss_scale": lambda **more: scaled(optimizers.Adam(0.01, **more)),
    "everything": everything,
    "everything_scaled": lambda **more: scaled(everything(**more)),
    # Has whole variables, and factors of slots.
    "adafactor": lambda **more: optimizers.Adafactor(0.01, **more),
    "ftrl": lambda **more: optimizers.Ftrl(0.1, **more),
    "lamb": lambda **more: optimizers.Lamb(0.01, **more),
    "muon": lambda **more: optimizers.Muon(0.01, **more),
    "nadam": lambda **more: optimizers.Nadam(0.01, **more),
}
