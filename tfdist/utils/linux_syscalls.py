"""Linux system calls that Python 3.11 does not provide, or not in every build; and forks."""

import ctypes
import os
import signal
import warnings

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYS_PIDFD_OPEN = 434  # the same number on every architecture except alpha

# Loaded before any fork: a child between fork and exec must not load a library.
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Moves this process into new namespaces; raises an OSError if the system does not permit it."""
    if _libc.unshare(flags) != 0:
        raise _error("unshare")


def fork() -> int:
    """Forks this process, which has one thread, and returns 0 in the child, its process id in the parent."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn about threads; only callers other than the command line can have any.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def become_subreaper() -> None:
    """Makes orphaned descendants of this process its children, so that it can find and end them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Has the kernel send a signal to this process when the *thread* that forked it ends.

    If `parent_pid`, the process that forked this one, is gone already, the signal comes at once.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    # If the parent died before the call, the signal never comes.
    if os.getppid() != parent_pid:
        if number == signal.SIGKILL:
            os._exit(1)
        os.kill(os.getpid(), number)


def pidfd_open(pid: int) -> int | None:
    """Returns a file descriptor that becomes readable when the process ends, or None before Linux 5.3."""
    fd = int(_libc.syscall(_SYS_PIDFD_OPEN, pid, 0))
    return fd if fd >= 0 else None


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
