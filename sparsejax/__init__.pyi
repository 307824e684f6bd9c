# Every public name; `__init__.py` imports each when it is first used.

from . import data as data
from . import losses as losses
from . import metrics as metrics
from . import optimizers as optimizers
from .checkpoint import CheckpointWarning as CheckpointWarning
from .config import HiddenConfig as HiddenConfig
from .config import InputConfig as InputConfig
from .config import NetworkConfig as NetworkConfig
from .config import OutputConfig as OutputConfig
from .data import DataError as DataError
from .data import SparseDataset as SparseDataset
from .data import UnknownFeaturesWarning as UnknownFeaturesWarning
from .data import datasets as datasets
from .data import from_arrow as from_arrow
from .data import read as read
from .data import read_adjacency as read_adjacency
from .data import read_pairs as read_pairs
from .data import read_parquet as read_parquet
from .data import read_text as read_text
from .gradients import RowGradient as RowGradient
from .gradients import RowParam as RowParam
from .gradients import accumulate as accumulate
from .gradients import clip_by_global_norm as clip_by_global_norm
from .gradients import global_norm as global_norm
from .gradients import grad as grad
from .gradients import lookup as lookup
from .gradients import value_and_grad as value_and_grad
from .layers import SparseDropout as SparseDropout
from .layers import SparseLinear as SparseLinear
from .layers import SparseOutput as SparseOutput
from .layers import normalize_rows as normalize_rows
from .models import FeedForward as FeedForward
from .ops.gather_matmul import gather_matmul as gather_matmul
from .ops.output_loss import output_loss as output_loss
from .ops.output_loss import output_loss_per_example as output_loss_per_example
from .ops.top_k import top_k as top_k
from .optimizers import Optimizer as Optimizer
from .prediction import evaluate as evaluate
from .prediction import recommend as recommend
from .prediction import Recommendations as Recommendations
from .run import load_model as load_model
from .sparse import CSR as CSR
from .training import EarlyStopping as EarlyStopping
from .training import fit as fit

__version__: str
