"""How parameters move: the optimizer, gradients of rows, rules and schedules.

Above the operations, below the layers. Users import the names below; the other wings may
import `optimizer`, `gradients`, `row_gradient`, `rules` and `schedules`.
"""

from sparsejax.optimizers import rules
from sparsejax.optimizers.optimizer import Optimizer as Optimizer
from sparsejax.optimizers.rules import Rule as Rule
from sparsejax.optimizers.rules import from_json as from_json
from sparsejax.optimizers.rules import get as get
from sparsejax.optimizers.rules import to_json as to_json
from sparsejax.optimizers.schedules import schedule as schedule

sgd, momentum, nesterov = rules.Sgd, rules.Momentum, rules.Nesterov
adagrad, rowwise_adagrad = rules.Adagrad, rules.RowwiseAdagrad
rmsprop, adadelta = rules.RmsProp, rules.Adadelta
adam, adamw, lazy_adam = rules.Adam, rules.AdamW, rules.LazyAdam
