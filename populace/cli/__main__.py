"""``python -m populace.cli``."""

import sys

from populace.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
