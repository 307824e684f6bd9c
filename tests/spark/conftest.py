"""A session of Spark on two executors, for all tests here."""

import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def java() -> None:
    """Skips the tests if Spark cannot run here."""
    pytest.importorskip("pyspark", reason="comes with the extra `spark`")
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        pytest.skip("Spark needs Java 17 or newer")


@pytest.fixture(scope="session")
def session(java) -> Iterator[Any]:
    """A session of two executors, each of which is a process of its own."""
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        # Executors have the environment that the session starts with.
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        root = str(pathlib.Path(__file__).parents[2])
        patch.setenv(
            "PYTHONPATH", f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        )
        # For short jobs: optimizing code, and collecting garbage by threads, takes longer.
        java_options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        settings = {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": java_options,
            "spark.executor.extraJavaOptions": java_options,
            "spark.log.level": "ERROR",
            # So a stage of too many tasks fails soon.
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "2s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "4",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",  # quicker for small tables
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        builder = SparkSession.builder.master("local-cluster[2,1,1024]")
        for name, value in settings.items():
            builder = builder.config(name, value)
        found = builder.getOrCreate()
        yield found
        name = found.sparkContext.applicationId
        home = found.sparkContext._jvm.System.getenv("SPARK_HOME")
        found.stop()
        if home is not None:  # what executors printed
            shutil.rmtree(pathlib.Path(home, "work", name), ignore_errors=True)
