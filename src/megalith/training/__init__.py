"""The training run: from settings to ranks that step, evaluate, save and stop."""
