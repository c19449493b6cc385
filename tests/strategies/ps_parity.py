"""The cases of tests/parity that parameter servers are tried with, too: those that no case of their own contains."""

PARITY = (
    "batch_logs compute_loss_of_the_users_own constraints ema embedding_with_global_clipnorm everything_on_arrays "
    "loss_scale masked_sequences on_batch_methods steps_per_execution texts two_optimizers_in_a_step weight_decay"
).split()
