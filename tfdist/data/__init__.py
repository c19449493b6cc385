"""Data where it is: Parquet files and the data of Spark, Dask and Ray as `tf.data` pipelines of Arrow batches.

Importing this package does not import TensorFlow, so a driver that only hands out data does not need it.
"""

from tfdist.data.dask_partitions import from_dask
from tfdist.data.parquet_files import from_parquet, from_spark
from tfdist.data.partitioned_data import PartitionedData
from tfdist.data.ray_blocks import from_ray

__all__ = ["PartitionedData", "from_dask", "from_parquet", "from_ray", "from_spark"]
