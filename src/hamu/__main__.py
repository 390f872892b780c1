"""`python -m hamu` is the command line."""

import sys

from hamu.cli import main

sys.exit(main())
