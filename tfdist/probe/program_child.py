"""The process of a probe: runs a program up to its first `fit`, and measures the model instead of training it."""

import dataclasses
import inspect
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import keras

from tfdist.probe.probe_strategy import ProbeStrategy, stand_in_for_all
from tfdist.probe.program_probe import ProbeRequest, ProgramProbe
from tfdist.probe.resident_memory import resident_bytes

# What this process writes to its parent: one JSON object a line, with one of these keys.
STAGE, RESULT, RAISED, NO_FIT = "stage", "result", "raised", "no_fit"


class Channel:
    """The pipe to the parent."""

    def __init__(self, descriptor: int) -> None:
        """Writes to `descriptor`, which the program's children do not inherit."""
        os.set_inheritable(descriptor, False)
        self._file = os.fdopen(descriptor, "w", buffering=1)

    def send(self, kind: str, value: Any) -> None:
        """Sends a message."""
        self._file.write(json.dumps({kind: value}) + "\n")

    def end(self, kind: str, value: Any) -> NoReturn:
        """Sends the last message and ends the process without the exit handlers of the program."""
        self.send(kind, value)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def main(argv: list[str]) -> None:
    """Runs the program.

    Args:
        argv: The descriptor of the pipe, the request as a JSON object, and the script with its arguments.
    """
    channel, request, script = Channel(int(argv[0])), ProbeRequest(**json.loads(argv[1])), argv[2:]
    strategy = ProbeStrategy()
    bare_bytes = resident_bytes()
    stand_in_for_all(strategy)
    probe = ProgramProbe(request, strategy, lambda text: channel.send(STAGE, text))
    _measure_first_fit(probe, channel, bare_bytes)
    sys.argv = list(script)
    sys.path.insert(0, str(Path(script[0]).resolve().parent))
    channel.send(STAGE, "runs the program up to its first `fit`")
    try:
        with strategy.scope():
            runpy.run_path(script[0], run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            channel.end(RAISED, f"SystemExit: {exit_.code}")
    except BaseException as error:
        traceback.print_exc()
        channel.end(RAISED, _described(error))
    channel.end(NO_FIT, script[0])


def _measure_first_fit(probe: ProgramProbe, channel: Channel, bare_bytes: int) -> None:
    """Makes the first `fit` of any model the measurement, after which the process ends."""
    fit = keras.Model.fit
    signature = inspect.signature(fit)

    def measured_fit(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        keras.Model.fit = fit
        began = time.monotonic()
        try:
            arguments = dict(signature.bind(self, *args, **kwargs).arguments)
            arguments.pop("self", None)
            result = probe.measure(self, fit, arguments)
        except BaseException as error:  # the program must not continue with a model that was measured
            traceback.print_exc()
            channel.end(RAISED, _described(error))
        channel.send(STAGE, f"has measured the model in {time.monotonic() - began:.1f} s")
        channel.end(RESULT, {"program": dataclasses.asdict(result), "bare_bytes": bare_bytes})

    keras.Model.fit = measured_fit


def _described(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
