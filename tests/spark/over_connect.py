"""Prepares, predicts and recommends through Spark Connect, in a process without another Spark.

python over_connect.py EVENTS PREDICTOR OUT RECOMMENDATIONS FRAME CHECKPOINTS
"""

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparsejax as sj


def main(
    events: str, predictor: str, out: str, parts: str, frame: str, checkpoints: str
) -> None:
    builder = SparkSession.builder.remote("local[2]")
    builder = builder.config("spark.checkpoint.dir", checkpoints)
    session = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    table = session.read.parquet(events)
    # An indeterminate plan.
    print(sj.spark.prepare(table.repartition(3), out, split_last=1, time="when"))
    sj.spark.predict(session, predictor, out, parts, k=3, parts=2, indicator=True)
    histories = table.groupBy("user").agg(F.collect_set("item").alias("items"))
    sj.spark.recommend(histories, predictor).write.parquet(frame)
    session.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
