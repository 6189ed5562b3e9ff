"""What can be learned: each task gives its data, its model, its loss terms, and what they cost."""
