"""Models, data, optimizers and programs of tests, and the comparison of a training with that of one process.

A test of a strategy is mostly one line:

    from testing.same_training import assert_same_training
    from testing.programs import Program

    def test_replicas_compute_what_one_process_does(cpus):
        assert_same_training(MirroredStrategy(cpus[:2]), Program(optimizer="adam"))

`data` has the samples, `models` the models for them, `optimizers` the table of optimizers, `programs` what is trained
and how, `pairs` chooses cases of which every two values meet. `launched_runs` of `tests/support` starts workers.
"""
