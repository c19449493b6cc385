"""The cases of tests/parity that parameter servers are tried with, too."""

PARITY = (
    "batch_logs class_weights compute_loss_of_the_users_own constraints ema embedding_with_global_clipnorm "
    "everything_on_arrays global_clipnorm last_batch_of_one_sample loss_scale loss_scale_overflow_on_one_replica "
    "on_batch_methods regularizers sample_weights seeded_shuffle_and_cache steps_per_execution texts "
    "two_optimizers_in_a_step weight_decay"
).split()
