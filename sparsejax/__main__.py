"""Entry point of `python -m sparsejax`."""

from sparsejax.cli.entry import run

run()
