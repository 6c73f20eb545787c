"""Choose: policies that turn an observation into an allocation."""
