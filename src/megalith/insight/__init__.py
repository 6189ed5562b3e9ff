"""What a run will cost, whether it is right, and how it went. Import the modules; nothing is gathered here."""
