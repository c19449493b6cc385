"""What all tests share: a quiet TensorFlow, in this process and in those it starts."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
