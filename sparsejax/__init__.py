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

import importlib
import warnings
from typing import Any

import lazy_loader

# `__init__.pyi` lists the names. Each is imported when it is first used: the command line
# answers --help at once, and `load_predictor` needs no Flax.
_named, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# Earlier names, by the package that has them now. 0.2 drops them.
_MOVED = {
    "data": """
        ClickSplit DenseColumn DenseDataset from_arrow HashedColumn Histories Manifest
        random_candidates read_adjacency read_pairs read_parquet read_text read_vae_cf
        scan_clicks scan_parquet scan_sequences ScannedClicks ScannedDataset
        ScannedSequences SequenceSplit Split UnknownFeaturesWarning UnseenUsers
        VocabularyColumn
    """,
    "embeddings": """
        build_click_model ClickModelConfig DCN DeepFM DLRM EmbeddingCollection
        EmbeddingPlan FeatureBatch FeatureConfig plan_embeddings TableConfig WideDeep
    """,
    "sequence": """
        build_sequence_model GRU HSTU SASRec SequenceConfig SequenceModel
    """,
    "nn": """
        HiddenConfig InputConfig LinearConfig NegativeSampler normalize_rows
        OutputConfig sampled_cross_entropy
    """,
    "optimizers": """
        accumulate clip_by_global_norm global_norm lookup RowGradient RowParam RowSums
    """,
    "mesh": """
        hidden_layout OtherProcessError ShardedCSR
    """,
    "training": """
        CheckpointWarning
    """,
}
_NOW = {
    name: f"{package}.{name}"
    for package, names in _MOVED.items()
    for name in names.split()
}
_NOW |= {
    "ClickPredictor": "Predictor",
    "load_click_predictor": "load_predictor",
    "predict_clicks": "predict",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # It takes as long as all the rest here, and a command must handle signals soon.
        metadata = importlib.import_module("importlib.metadata")
        return metadata.version("sparsejax")
    if name not in _NOW:
        return _named(name)
    warnings.warn(
        f"sparsejax.{name} is sparsejax.{_NOW[name]} now; 0.2 drops the earlier name",
        FutureWarning,
        stacklevel=2,
    )
    package, _, name = f".{_NOW[name]}".rpartition(".")
    return getattr(importlib.import_module(f"sparsejax{package}"), name)
