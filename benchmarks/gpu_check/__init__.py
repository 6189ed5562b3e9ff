"""``make gpu-check``: one command, with a deadline of its own, for the first minutes on a GPU."""
