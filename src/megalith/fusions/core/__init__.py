"""Shared by all families: choice of a path, registration with torch, row handling, checks, common formulas."""
