"""Reads files into data sets in host memory, without a device or a mesh.

This wing stands beside `nn` and below `engine`, which makes batches. The names below are
public. Its subpackages, from the lowest to the highest: `files`, the formats on disk; `scan`, row
groups that are decoded and joined to rows; `events`, blocks of users' events; `sets`, data sets
in memory; `prepared`, folders that `prepare` writes; `scans`, data sets that are read in pieces;
`reading`, functions that read a source into a data set."""

from sparsejax.data import datasets as datasets
from sparsejax.data.events.sniff import guess_format as guess_format
from sparsejax.data.files.opening import DataError as DataError
from sparsejax.data.prepared.folder import Manifest as Manifest
from sparsejax.data.prepared.preparation import prepare as prepare
from sparsejax.data.reading.by_name import read_user_features as read_user_features
from sparsejax.data.reading.item_features import (
    read_item_features as read_item_features,
)
from sparsejax.data.reading.protocols import UnseenUsers as UnseenUsers
from sparsejax.data.reading.protocols import random_candidates as random_candidates
from sparsejax.data.reading.protocols import read_vae_cf as read_vae_cf
from sparsejax.data.reading.read_sequences import read_sequences as read_sequences
from sparsejax.data.reading.readers import from_arrow as from_arrow
from sparsejax.data.reading.readers import read as read
from sparsejax.data.reading.readers import read_adjacency as read_adjacency
from sparsejax.data.reading.readers import read_pairs as read_pairs
from sparsejax.data.reading.readers import read_parquet as read_parquet
from sparsejax.data.reading.readers import read_text as read_text
from sparsejax.data.scans.scan_clicks import ScannedClicks as ScannedClicks
from sparsejax.data.scans.scan_clicks import scan_clicks as scan_clicks
from sparsejax.data.scans.scan_items import ScannedDataset as ScannedDataset
from sparsejax.data.scans.scan_items import scan_parquet as scan_parquet
from sparsejax.data.scans.scan_sequences import ScannedSequences as ScannedSequences
from sparsejax.data.scans.scan_sequences import scan_sequences as scan_sequences
from sparsejax.data.sets.click_schema import ClickSchema as ClickSchema
from sparsejax.data.sets.click_schema import DenseColumn as DenseColumn
from sparsejax.data.sets.click_schema import HashedColumn as HashedColumn
from sparsejax.data.sets.click_schema import KeyColumn as KeyColumn
from sparsejax.data.sets.click_schema import LabelColumn as LabelColumn
from sparsejax.data.sets.click_schema import VocabularyColumn as VocabularyColumn
from sparsejax.data.sets.clicks import ClickDataset as ClickDataset
from sparsejax.data.sets.clicks import ClickSplit as ClickSplit
from sparsejax.data.sets.clicks import read_clicks as read_clicks
from sparsejax.data.sets.dataset import SparseDataset as SparseDataset
from sparsejax.data.sets.dense import DenseDataset as DenseDataset
from sparsejax.data.sets.event_schema import EventSchema as EventSchema
from sparsejax.data.sets.events import Events as Events
from sparsejax.data.sets.events import UserFeatures as UserFeatures
from sparsejax.data.sets.item_features import ItemFeatures as ItemFeatures
from sparsejax.data.sets.named_rows import (
    UnknownFeaturesWarning as UnknownFeaturesWarning,
)
from sparsejax.data.sets.sequences import Histories as Histories
from sparsejax.data.sets.sequences import SequenceDataset as SequenceDataset
from sparsejax.data.sets.sequences import SequenceSplit as SequenceSplit
from sparsejax.data.sets.splits import Split as Split
from sparsejax.data.sets.vocabulary import vocabulary_order as vocabulary_order
