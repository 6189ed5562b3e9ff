"""``megalith verify``: a user's own recipe, made small, in many layouts of local ranks against one process."""
