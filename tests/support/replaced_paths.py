"""Patches of saves for the duration of a test, which record the paths that they replace."""

from contextlib import contextmanager

from tfdist.utils.atomic_files import replacing_all


def recording_patch(monkeypatch, patched, patch_files):
    """Returns a function that patches this process until the end of the test, and returns the list of replaced paths.

    Args:
        monkeypatch: The fixture.
        patched: The attributes that are patched, as owners and names.
        patch_files: Patches them with a function from a path to the context in which it is replaced.
    """
    for owner, name in patched:
        monkeypatch.setattr(owner, name, getattr(owner, name))
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
