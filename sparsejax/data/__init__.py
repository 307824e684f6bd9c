"""From files to data sets in host memory, without a device or a mesh.

This wing stands beside `nn` and below `engine`, which makes batches. The names below are
public. Other wings may also import `entries`, `events`, `files`, `folder`, `names`,
`preparation`, `sources`, `stores`, `values` and `writers`.
"""

from sparsejax.data import datasets as datasets
from sparsejax.data.click_schema import ClickSchema as ClickSchema
from sparsejax.data.click_schema import DenseColumn as DenseColumn
from sparsejax.data.click_schema import HashedColumn as HashedColumn
from sparsejax.data.click_schema import VocabularyColumn as VocabularyColumn
from sparsejax.data.clicks import ClickDataset as ClickDataset
from sparsejax.data.clicks import ClickSplit as ClickSplit
from sparsejax.data.clicks import read_clicks as read_clicks
from sparsejax.data.dataset import SparseDataset as SparseDataset
from sparsejax.data.dataset import UnknownFeaturesWarning as UnknownFeaturesWarning
from sparsejax.data.dense import DenseDataset as DenseDataset
from sparsejax.data.events.sniff import guess_format as guess_format
from sparsejax.data.files import DataError as DataError
from sparsejax.data.folder import Manifest as Manifest
from sparsejax.data.preparation import prepare as prepare
from sparsejax.data.protocols import UnseenUsers as UnseenUsers
from sparsejax.data.protocols import random_candidates as random_candidates
from sparsejax.data.protocols import read_vae_cf as read_vae_cf
from sparsejax.data.read_sequences import read_sequences as read_sequences
from sparsejax.data.readers import from_arrow as from_arrow
from sparsejax.data.readers import read as read
from sparsejax.data.readers import read_adjacency as read_adjacency
from sparsejax.data.readers import read_pairs as read_pairs
from sparsejax.data.readers import read_parquet as read_parquet
from sparsejax.data.readers import read_text as read_text
from sparsejax.data.scan_clicks import ScannedClicks as ScannedClicks
from sparsejax.data.scan_clicks import scan_clicks as scan_clicks
from sparsejax.data.scan_items import ScannedDataset as ScannedDataset
from sparsejax.data.scan_items import scan_parquet as scan_parquet
from sparsejax.data.scan_sequences import ScannedSequences as ScannedSequences
from sparsejax.data.scan_sequences import scan_sequences as scan_sequences
from sparsejax.data.sequences import Histories as Histories
from sparsejax.data.sequences import SequenceDataset as SequenceDataset
from sparsejax.data.sequences import SequenceSplit as SequenceSplit
from sparsejax.data.splits import Split as Split
from sparsejax.data.vocabulary import vocabulary_order as vocabulary_order
