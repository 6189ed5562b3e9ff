"""What keeps a run alive or ends it in order: ranks and their supervisor, requests to stop."""
