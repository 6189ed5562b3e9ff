"""Starts and supervises ranks, handles requests to stop, and reports failures."""
