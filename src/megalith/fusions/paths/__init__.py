"""How an operation chooses a path, how it is registered with torch, and blocks of rows for a CPU."""
