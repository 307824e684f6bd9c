"""`python -m sparsejax`."""

import sys

from sparsejax.cli.main import main

sys.exit(main())
