"""The only place that knows torch versions: names that are private, or differ between torch 2.11 and 2.13."""
