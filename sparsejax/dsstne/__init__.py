"""For people who come from Amazon's DSSTNE: its files are read and written here.

This wing stands above `training` and below `cli`; nothing below knows of it. The names
below are public. `cli` may also import `datasets`, `index_files`, `netcdf` and `text`.
`pip install "sparsejax[dsstne]"` brings what it needs.
"""

from sparsejax.dsstne.netcdf import read_datasets as read_datasets
from sparsejax.dsstne.netcdf import write_datasets as write_datasets
