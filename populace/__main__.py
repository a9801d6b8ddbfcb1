"""``python -m populace``: the command line."""

import sys

from populace.cli import main

if __name__ == "__main__":
    sys.exit(main())
