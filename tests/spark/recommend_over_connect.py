"""Recommends by Spark Connect, which a process has besides no other Spark.

python recommend_over_connect.py PREDICTOR HISTORIES

It prints the result as JSON.
"""

import json
import sys

from pyspark.sql import SparkSession

import sparsejax as sj


def main(predictor: str, histories: str) -> None:
    session = SparkSession.builder.remote("local[1]").getOrCreate()
    frame = session.createDataFrame(json.loads(histories), "user int, items array<int>")
    found = sj.spark.recommend(frame, predictor, k=2).orderBy("user")
    print(json.dumps([[row["user"], row["items"]] for row in found.collect()]))
    session.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
