"""What every engine does: a test file of an engine has a subclass, and tests only what is special to its engine."""

import collections
import re
import signal
import subprocess
import sys
import threading
import time

import engine_functions as functions
import numpy as np
import pytest
from engine_runs import assert_identical, eventually

from tfdist.launch import WorkerError

BOTH = [("worker", 0, "1"), ("worker", 1, "1")]
DRIVER = """
import sys
import engine_functions
from tfdist.launch import {name}
with {context}:
    {name}(engine_functions.wait_for_signal, sys.argv[2], workers=2)
"""


def both(tmp_path, event):
    """Whether both workers of `wait_for_signal` have done something."""
    return lambda: len(list(tmp_path.glob(f"{event}-*"))) == 2


class EngineContract:
    """The tests, with what differs between engines. The fixture `engine` starts two places and checks what is left."""

    call: staticmethod
    owner: int  # the generation of the engine's process that holds a place: see `engine_functions.ancestor`
    too_few: str  # how it says that there are no three places
    lost: str  # how it says that place 1 was lost
    places_that_start_again: tuple[tuple[int, int], ...] = ((1, 3), (0, 3))  # ranks, and `owner`
    lost_seconds = 30  # place 0 would wait for 60
    one_place_threads = "1"
    returns_after_places = True  # an interrupted call; else places end by themselves soon after
    driver_context: str  # how another driver, with the result of `address`, uses the same places

    def one_place(self, engine):
        """Options that name the engine, or describe a place."""
        return {}

    def address(self, engine):
        """What another driver needs."""
        raise NotImplementedError

    def printed(self, engine, capfd):
        """All lines that workers have printed since the start of the engine, or since the last call."""
        return capfd.readouterr().out.splitlines()

    def test_the_weights_are_those_of_tfdist_run(self, engine, reference, tmp_path):
        values = self.call(functions.train, str(tmp_path), workers=2)
        assert [steps for _, steps in values] == [2 * functions.STEPS_OF_EPOCH] * 2
        for weights, _ in values:
            assert_identical(weights, reference)
        assert np.abs(reference[0]).max() > 0

    @pytest.mark.long
    def test_values_by_rank_and_the_output_of_workers(self, engine, capfd):
        before = collections.Counter(self.printed(engine, capfd))
        assert self.call(functions.task_and_threads, 10, workers=2) == [("worker", 0, "1"), ("worker", 10, "1")]
        alone = self.call(functions.task_and_threads, 10, workers=1, **self.one_place(engine))
        assert alone == [("worker", 0, self.one_place_threads)]
        lines = collections.Counter(self.printed(engine, capfd)) - before
        printed = {line: count for line, count in lines.items() if re.match(r"\[\d+\] ", line)}
        assert printed == {"[0] task 0": 2, "[1] task 1": 1}

    @pytest.mark.long
    def test_a_chief_alone_returns_a_value(self, engine):
        assert self.call(functions.task_and_threads, 10, workers=2, chief=True) == [("chief", 0, "1")]

    def test_the_error_has_the_rank_and_the_users_lines(self, engine):
        with pytest.raises(WorkerError, match=r"Worker 1 of 2 failed: KeyError: 'no such column'") as caught:
            self.call(functions.fail_in_one, "no such column", workers=2)
        assert caught.value.rank == 1 and "raise KeyError(message)" in caught.value.traceback

    def test_too_few_places_are_counted(self, engine):
        with pytest.raises(TimeoutError, match=self.too_few):
            self.call(functions.task_and_threads, 1, workers=3, start_timeout_seconds=1)

    @pytest.mark.long
    @pytest.mark.parametrize("victim", ["worker", "place"])
    def test_a_killed_process_changes_no_weight(self, engine, reference, tmp_path, victim, capfd):
        generation = {"worker": 0, "place": self.owner}[victim]
        values = self.call(functions.train, str(tmp_path), generation, workers=2, max_restarts=1)
        assert (tmp_path / "killed").exists()
        assert all(steps < 2 * functions.STEPS_OF_EPOCH for _, steps in values), "resumed"
        for weights, _ in values:
            assert_identical(weights, reference)
        assert ("restarting in new places (0 restarts left)" in capfd.readouterr().err) == (victim == "place")

    @pytest.mark.long
    def test_the_others_train_on_without_a_killed_process(self, engine, tmp_path):
        expected = self.call(functions.train_elastically, str(tmp_path), workers=2)[0][0]
        for victim, generation in ((1, 0), *(self.places_that_start_again)):
            directory = tmp_path / f"{victim}-{generation}"
            directory.mkdir()
            arguments = str(directory), victim, generation
            values = self.call(functions.train_elastically, *arguments, workers=2, elastic=1)
            assert (directory / "killed").exists()
            other = 1 - victim
            assert values[other][1] == ((0, 1), (other,), (0, 1)), "one trained alone, and the other has joined"
            for weights, _ in values:
                for weight, same in zip(weights, expected, strict=True):
                    # 256 updates of sums that associate differently, of weights up to 1.
                    np.testing.assert_allclose(weight, same, rtol=5e-6, atol=5e-6)

    @pytest.mark.long
    def test_a_lost_place_ends_the_call(self, engine):
        start = time.monotonic()
        with pytest.raises(WorkerError, match=rf"no restart is left. Received: {self.lost}"):
            self.call(functions.lose_place, self.owner, workers=2)
        assert time.monotonic() - start < self.lost_seconds, "not after the minute of place 0"
        assert self.call(functions.task_and_threads, 1, workers=2) == BOTH, "in the place that replaces it"

    @pytest.mark.long
    def test_an_interrupt_lets_the_function_save(self, engine, tmp_path):
        def interrupt():
            eventually(both(tmp_path, "started"), "started")
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            self.call(functions.wait_for_signal, str(tmp_path), workers=2)
        eventually(both(tmp_path, "saved"), "saved", 0 if self.returns_after_places else 60)
        thread.join()

    @pytest.mark.long
    def test_the_places_of_a_killed_driver_end(self, engine, tmp_path):
        self.kill_driver(self.address(engine), tmp_path)

    def kill_driver(self, address, tmp_path):
        """Kills another driver while its workers wait: they have time to save."""
        program = DRIVER.format(name=self.call.__name__, context=self.driver_context)
        driver = subprocess.Popen([sys.executable, "-c", program, address, str(tmp_path)])
        try:
            eventually(both(tmp_path, "started"), "started", 120)
        finally:
            driver.kill()
            driver.wait()
        eventually(both(tmp_path, "saved"), "saved")
