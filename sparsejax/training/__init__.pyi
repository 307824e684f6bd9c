# Every public name beside those at the top; `__init__.py` imports each when it is used.

from ..engine.train.checkpoint import CheckpointWarning as CheckpointWarning
from ..engine.train.dispatch import Dispatch as Dispatch
from ..engine.train.dispatch import Epochs as Epochs
from ..engine.train.dispatch import Program as Program
from ..engine.train.resident import Examples as Examples
from ..engine.train.resident import Trainable as Trainable
from ..verbs.place import place as place
from ..verbs.recipe import Recipe as Recipe
from ..verbs.recipe import recipe as recipe
