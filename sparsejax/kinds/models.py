"""The names of models, and their kinds. It imports nothing: `--help` answers at once."""

# The first is trained unless another one is named.
MODELS = {
    "autoencoder": "items",
    **dict.fromkeys(("sasrec", "hstu", "gru"), "histories"),
    **dict.fromkeys(("dlrm", "dcn", "deepfm", "wide_deep", "din", "tin"), "clicks"),
}
DEFAULT_MODEL, *_ = MODELS
