# Every public name; `__init__.py` imports each when it is first used.

from .jobs import JobError as JobError
from .predict_jobs import predict as predict
from .preparation import prepare as prepare
from .recommend_jobs import recommend as recommend
from .run_copies import fetch_run as fetch_run
from .training import train as train
