"""`python -m autopipe` is the `autopipe` command."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # Python has put the current folder there, whose `queue.py` is not ours.
    from autopipe.cli.main import main

    sys.exit(main())
