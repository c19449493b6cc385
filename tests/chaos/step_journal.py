"""A callback that records in a worker's journal what `fit` does."""

import threading

import keras


class StepJournal(keras.callbacks.Callback):
    """Records the phase of `fit`, and which ids each replica of this process has seen in each step."""

    def __init__(self, journal):
        super().__init__()
        self._journal = journal
        self._seen, self._lock = {}, threading.Lock()

    def tell(self, replica, ids):
        """Called within a step. A replica without samples gets one of zeros."""
        with self._lock:
            self._seen.setdefault(str(int(replica)), []).extend(int(number) for number in ids if number)

    def on_train_begin(self, logs=None):
        self._journal.phase("restore")

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._is_first = epoch, True
        self._journal.phase("beginning of an epoch")

    def on_train_batch_begin(self, batch, logs=None):
        if self._is_first:  # not always 0: `fit` may resume in the middle
            self._is_first = False
            self._journal.phase("steps")

    def on_train_batch_end(self, batch, logs=None):
        with self._lock:
            seen, self._seen = self._seen, {}
        self._journal.write(step=[self._epoch, batch], seen=seen)

    def on_test_begin(self, logs=None):
        self._journal.phase("validation")

    def on_epoch_end(self, epoch, logs=None):
        self._journal.phase("end of an epoch")

    def on_train_end(self, logs=None):
        self._journal.phase("end of the training")
