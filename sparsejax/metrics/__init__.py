"""Metrics of rankings (`recall_at_k` to `mean_popularity`) and of clicks (`auc` and below).

The metrics take arrays, and import no models. `compare` tests whether two measurements differ. The
modules `ranking`, `clicks` and `binned_auc` state the formulas.
"""

from sparsejax.metrics.binned_auc import AucBounds as AucBounds
from sparsejax.metrics.binned_auc import BinnedAuc as BinnedAuc
from sparsejax.metrics.clicks import GroupAuc as GroupAuc
from sparsejax.metrics.clicks import auc as auc
from sparsejax.metrics.clicks import calibration as calibration
from sparsejax.metrics.clicks import group_auc as group_auc
from sparsejax.metrics.clicks import log_loss as log_loss
from sparsejax.metrics.clicks import normalized_entropy as normalized_entropy
from sparsejax.metrics.comparison import Comparison as Comparison
from sparsejax.metrics.comparison import Difference as Difference
from sparsejax.metrics.comparison import Measured as Measured
from sparsejax.metrics.comparison import Rows as Rows
from sparsejax.metrics.comparison import compare as compare
from sparsejax.metrics.ranking import coverage as coverage
from sparsejax.metrics.ranking import gini as gini
from sparsejax.metrics.ranking import hit_rate_at_k as hit_rate_at_k
from sparsejax.metrics.ranking import is_label as is_label
from sparsejax.metrics.ranking import map_at_k as map_at_k
from sparsejax.metrics.ranking import mean_popularity as mean_popularity
from sparsejax.metrics.ranking import mrr_at_k as mrr_at_k
from sparsejax.metrics.ranking import ndcg_at_k as ndcg_at_k
from sparsejax.metrics.ranking import precision_at_k as precision_at_k
from sparsejax.metrics.ranking import recall_at_k as recall_at_k
from sparsejax.metrics.ranking import recommendation_counts as recommendation_counts
from sparsejax.metrics.ranking import truncated_recall_at_k as truncated_recall_at_k
