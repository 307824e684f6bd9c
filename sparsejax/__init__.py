"""Recommendation models with sparse inputs and outputs, on JAX.

>>> import sparsejax as sj
>>> train, heldout = sj.datasets.msweb().train.split(0.8, seed=0)
>>> config = sj.NetworkConfig.autoencoder(hidden=(64,))
>>> size = train.num_features
>>> model = sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
>>> optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
>>> history = sj.fit(model, optimizer, train, num_epochs=1)
>>> found = sj.recommend(model, train, k=10, exclude=train)
>>> found.ids.shape
(32711, 10)
"""

import importlib.metadata

from sparsejax import losses as losses
from sparsejax import metrics as metrics
from sparsejax import optimizers as optimizers
from sparsejax.checkpoint import CheckpointWarning as CheckpointWarning
from sparsejax.config import HiddenConfig as HiddenConfig
from sparsejax.config import InputConfig as InputConfig
from sparsejax.config import NetworkConfig as NetworkConfig
from sparsejax.config import OutputConfig as OutputConfig
from sparsejax.data import DataError as DataError
from sparsejax.data import SparseDataset as SparseDataset
from sparsejax.data import UnknownFeaturesWarning as UnknownFeaturesWarning
from sparsejax.data import datasets as datasets
from sparsejax.data import from_arrow as from_arrow
from sparsejax.data import read as read
from sparsejax.data import read_adjacency as read_adjacency
from sparsejax.data import read_pairs as read_pairs
from sparsejax.data import read_parquet as read_parquet
from sparsejax.data import read_text as read_text
from sparsejax.gradients import RowGradient as RowGradient
from sparsejax.gradients import RowParam as RowParam
from sparsejax.gradients import accumulate as accumulate
from sparsejax.gradients import clip_by_global_norm as clip_by_global_norm
from sparsejax.gradients import global_norm as global_norm
from sparsejax.gradients import grad as grad
from sparsejax.gradients import lookup as lookup
from sparsejax.gradients import value_and_grad as value_and_grad
from sparsejax.layers import SparseDropout as SparseDropout
from sparsejax.layers import SparseLinear as SparseLinear
from sparsejax.layers import SparseOutput as SparseOutput
from sparsejax.layers import normalize_rows as normalize_rows
from sparsejax.models import FeedForward as FeedForward
from sparsejax.ops.gather_matmul import gather_matmul as gather_matmul
from sparsejax.ops.output_loss import output_loss as output_loss
from sparsejax.ops.output_loss import output_loss_per_example as output_loss_per_example
from sparsejax.ops.top_k import top_k as top_k
from sparsejax.optimizers import Optimizer as Optimizer
from sparsejax.prediction import Recommendations as Recommendations
from sparsejax.prediction import evaluate as evaluate
from sparsejax.prediction import recommend as recommend
from sparsejax.run import load_model as load_model
from sparsejax.sparse import CSR as CSR
from sparsejax.training import EarlyStopping as EarlyStopping
from sparsejax.training import fit as fit

__version__ = importlib.metadata.version("sparsejax")
