"""Released packages under the suite: thin adapters, what is expected of each, and what was found."""
