"""The error of a user of the command line."""


class UsageError(ValueError):
    """The command, or the environment it runs in, is wrong: nothing was started, exit code 2."""
