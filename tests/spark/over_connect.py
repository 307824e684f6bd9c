"""Prepares a file of events by Spark Connect, which a process has besides no other Spark.

python over_connect.py EVENTS OUT CHECKPOINTS
"""

import sys

from pyspark.sql import SparkSession

import sparsejax as sj


def main(events: str, out: str, *checkpoints: str) -> None:
    builder = SparkSession.builder.remote("local[2]")
    for folder in checkpoints:
        builder = builder.config("spark.checkpoint.dir", folder)
    session = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    # An indeterminate plan.
    frame = session.read.parquet(events).repartition(3)
    print(sj.spark.prepare(frame, out, split_last=1, time="when"))
    session.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
