"""The error of a probe."""


class ProbeError(RuntimeError):
    """A program or a machine cannot be measured; the message says why and what to do."""
