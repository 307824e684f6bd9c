"""Updates of parameters: the optimizer, gradients of rows, rules and schedules.

This package imports the operations, and the layers import it. Users import the names below;
other packages may import `optimizer`, `gradients`, `row_gradient`, `rules` and `schedules`.
"""

from sparsejax.optimizers.gradients import RowParam as RowParam
from sparsejax.optimizers.gradients import grad as grad
from sparsejax.optimizers.gradients import lookup as lookup
from sparsejax.optimizers.gradients import value_and_grad as value_and_grad
from sparsejax.optimizers.optimizer import Optimizer as Optimizer
from sparsejax.optimizers.row_gradient import RowGradient as RowGradient
from sparsejax.optimizers.row_gradient import RowSums as RowSums
from sparsejax.optimizers.row_gradient import accumulate as accumulate
from sparsejax.optimizers.row_gradient import clip_by_global_norm as clip_by_global_norm
from sparsejax.optimizers.row_gradient import global_norm as global_norm
from sparsejax.optimizers.rules import Rule as Rule
from sparsejax.optimizers.rules import adadelta as adadelta
from sparsejax.optimizers.rules import adagrad as adagrad
from sparsejax.optimizers.rules import adam as adam
from sparsejax.optimizers.rules import adamax as adamax
from sparsejax.optimizers.rules import adamw as adamw
from sparsejax.optimizers.rules import from_json as from_json
from sparsejax.optimizers.rules import ftrl as ftrl
from sparsejax.optimizers.rules import get as get
from sparsejax.optimizers.rules import lazy_adam as lazy_adam
from sparsejax.optimizers.rules import momentum as momentum
from sparsejax.optimizers.rules import nesterov as nesterov
from sparsejax.optimizers.rules import rmsprop as rmsprop
from sparsejax.optimizers.rules import rowwise_adagrad as rowwise_adagrad
from sparsejax.optimizers.rules import sgd as sgd
from sparsejax.optimizers.rules import to_json as to_json
from sparsejax.optimizers.schedules import schedule as schedule
