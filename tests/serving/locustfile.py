"""The users of `test_locust`: requests of one row, of several rows, and some that must be
refused.
"""

import json
import random

import locust
from served import NAMES

PATH = "/v2/models/films/infer"


class Visitor(locust.FastHttpUser):
    """Sends five requests a second, independently of the time until answers arrive."""

    wait_time = locust.constant_throughput(5)

    def post(self, document: dict, name: str, status: int) -> None:
        with self.client.post(
            PATH,
            data=json.dumps(document),
            headers={"content-type": "application/json"},
            name=name,
            catch_response=True,
        ) as answer:
            if answer.status_code == status:
                answer.success()
            else:
                answer.failure(f"{answer.status_code}: {answer.text}")

    @locust.task(8)
    def a_row(self) -> None:
        names = random.sample(NAMES, random.randint(0, 4))
        tensor = {"name": "items", "datatype": "BYTES", "shape": [len(names)]}
        self.post({"inputs": [tensor | {"data": names}]}, "a row", 200)

    @locust.task(2)
    def rows(self) -> None:
        names = random.sample(NAMES, 4)
        inputs = [
            {"name": "items", "datatype": "BYTES", "shape": [4], "data": names},
            {"name": "lengths", "datatype": "INT32", "shape": [2], "data": [1, 3]},
        ]
        self.post({"inputs": inputs, "parameters": {"k": 2}}, "rows", 200)

    @locust.task(1)
    def refused(self) -> None:
        tensor = {"name": "items", "datatype": "BYTES", "shape": [2], "data": ["a"]}
        self.post({"inputs": [tensor]}, "refused", 422)
