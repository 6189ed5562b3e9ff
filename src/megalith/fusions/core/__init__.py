"""What every family is built on: choice of a path, registration, rows, checks, formulas that several share."""
