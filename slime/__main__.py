"""``python -m slime``: the command ``slime`` where the script is not on the path."""

import sys

from slime.cli import main

if __name__ == "__main__":
    sys.exit(main())
