"""``python -m megalith`` is the command ``megalith``: the form that torchrun starts."""

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Runs the command line and exits; Ctrl-C ends it without a traceback while its modules are imported, too."""
    try:
        from megalith.cli.main import main as run_and_exit
    except KeyboardInterrupt:
        sys.exit(130)
    run_and_exit()


if __name__ == "__main__":
    main()
