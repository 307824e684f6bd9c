"""Models without training, which tell whether a network earns its place.

`popularity`, `item_knn` and `ease` take training data and return a model. `recommend`
and `evaluate` take it like any other.
"""

from sparsejax.baselines.models import ease as ease
from sparsejax.baselines.models import item_knn as item_knn
from sparsejax.baselines.models import popularity as popularity
