"""One training under way: what every framework has in common, and the hooks into each."""
