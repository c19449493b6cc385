"""An estimator and a transformer of Spark ML that train and apply Keras models.

Importing this package imports PySpark, and neither Keras nor TensorFlow: the driver needs them only for what a program
itself creates with them. Workers, and the Python processes of executors that predict, import them late.
"""

from tfdist.utils.optional_modules import import_library

import_library("pyspark.ml", "runs estimators", "spark")

from tfdist.spark.keras_estimator import KerasEstimator  # noqa: E402
from tfdist.spark.keras_model import KerasModel  # noqa: E402

__all__ = ["KerasEstimator", "KerasModel"]
