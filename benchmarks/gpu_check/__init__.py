"""``make gpu-check``: one command with a time budget, for the first minutes on a GPU."""
