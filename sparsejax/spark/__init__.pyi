# Every public name; `__init__.py` imports each when it is first used.

from .preparation import prepare as prepare
