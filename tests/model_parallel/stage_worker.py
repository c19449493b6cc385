"""A process that holds stages for the program that connects to it, until it is killed."""

import json
import sys

import tensorflow as tf

if __name__ == "__main__":
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    tf.distribute.Server(json.loads(sys.argv[1]), job_name="worker", task_index=int(sys.argv[2]), config=config).join()
