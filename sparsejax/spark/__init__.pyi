# All public names. `__init__.py` imports each of them at its first use.

from .jobs import JobError as JobError
from .predict_jobs import predict as predict
from .preparation import prepare as prepare
from .recommend_jobs import recommend as recommend
from .run_copies import fetch_run as fetch_run
from .training import train as train
