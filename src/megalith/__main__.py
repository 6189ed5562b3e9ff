"""``python -m megalith`` is the command ``megalith``: the form that torchrun starts."""

from megalith.cli.main import main

main()
