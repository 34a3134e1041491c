"""`python -m autopipe` is the `autopipe` command."""

import sys

from autopipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
