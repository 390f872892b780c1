"""`hamu` and `python -m hamu`: the command line."""

import sys


def main() -> int:
    """Load the command line and run it; Ctrl-C while it loads ends it without a traceback."""
    try:
        from hamu.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
