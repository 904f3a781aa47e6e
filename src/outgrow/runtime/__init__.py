"""Carries a plan out in a live step: hooks, pool, copies, and the care that keeps each op inside the budget."""
