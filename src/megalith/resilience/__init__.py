"""What keeps a run alive or ends it in order: requests to stop."""
