"""`python -m megappo`: the same as the `megappo` command, so that torchrun can start it."""

import sys

from megappo.cli.main import main

sys.exit(main())
