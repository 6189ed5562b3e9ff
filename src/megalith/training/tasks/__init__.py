"""What a run trains: each task defines its data, its model, its loss terms, and their cost."""
