"""``megalith verify``: compares a reduced version of a recipe in many layouts of local ranks with one process."""
