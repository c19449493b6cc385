"""Patches of saves for the duration of a test, which record the paths that they replace."""

from contextlib import contextmanager

from tfdist.utils.atomic_files import replacing_all


def recording_patch(patch_files):
    """Returns a function that patches this process, and returns the list of replaced paths. Use it when `unpatched`.

    Args:
        patch_files: Patches Keras or TensorFlow with a function from a path to the context in which it is replaced.
    """
    replaced = []

    @contextmanager
    def recorded(path):
        replaced.append(path)
        with replacing_all(path) as unfinished:
            yield unfinished

    def patch():
        patch_files(recorded)
        return replaced

    return patch
