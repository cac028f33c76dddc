"""`python -m sluice.serve.replica` is `sluice-replica`."""

import sys

from sluice.serve.replica.main import main

sys.exit(main())
