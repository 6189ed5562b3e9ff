"""The commands, one file each; no logic."""
