"""Names of models and their kinds. It imports nothing, so that `--help` answers at once."""

# The first model is the default.
MODELS = {
    "autoencoder": "items",
    **dict.fromkeys(("sasrec", "hstu", "gru"), "histories"),
    **dict.fromkeys(("dlrm", "dcn", "deepfm", "wide_deep", "din", "tin"), "clicks"),
}
DEFAULT_MODEL, *_ = MODELS
