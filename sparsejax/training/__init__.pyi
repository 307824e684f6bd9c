# Every public name beside those at the top; `__init__.py` imports each when it is used.

from .dispatch import Dispatch as Dispatch
from .dispatch import Epochs as Epochs
from .dispatch import Program as Program
from .placing import place as place
from .recipe import Recipe as Recipe
from .recipe import recipe as recipe
from .resident import Examples as Examples
from .resident import Trainable as Trainable
