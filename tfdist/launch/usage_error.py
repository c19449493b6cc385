"""The error for an invalid command line or environment."""


class UsageError(ValueError):
    """The command, or the environment it runs in, is invalid: nothing was started; exit code 2."""
