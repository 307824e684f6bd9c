"""`python -m sparsejax`."""

from sparsejax.cli.main import run

run()
