"""Engines that copy between tiers beside the computation."""
