"""`python -m sparsejax`."""

import sys

from sparsejax.cli import main

sys.exit(main())
