"""``python -m megalith`` runs the command ``megalith``; torchrun starts it in this form."""

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Runs the command line and exits; Ctrl-C produces no traceback even while modules are being imported."""
    try:
        from megalith.cli.main import main as run_and_exit
    except KeyboardInterrupt:
        sys.exit(130)
    run_and_exit()


if __name__ == "__main__":
    main()
