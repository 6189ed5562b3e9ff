"""Dtype probe, verification of layouts, baselines, the demo, and reports of runs. Import the modules directly."""
