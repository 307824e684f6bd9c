"""Support for users of Amazon's DSSTNE: its files, networks, rules and commands.

This package imports `training`, and only `cli` imports this package. The names
below are public. `cli` may also import `dsstne.cli`.
`pip install 'sparsejax[dsstne]'` installs its requirements.
"""

from sparsejax.dsstne.definition import Definition as Definition
from sparsejax.dsstne.keys import parse as parse
from sparsejax.dsstne.layer_definition import Connection as Connection
from sparsejax.dsstne.netcdf import read_datasets as read_datasets
from sparsejax.dsstne.netcdf import read_ignore_zeros as read_ignore_zeros
from sparsejax.dsstne.netcdf import read_weights as read_weights
from sparsejax.dsstne.netcdf import write_datasets as write_datasets
from sparsejax.dsstne.network import Network as Network
from sparsejax.dsstne.network import load_network as load_network
from sparsejax.dsstne.network import save_network as save_network
from sparsejax.dsstne.network_files import Parameters as Parameters
