"""Results of pure functions kept in memory that all processes of a node share."""
