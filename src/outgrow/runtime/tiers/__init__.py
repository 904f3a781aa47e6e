"""Where bytes live: the device's own memory and the tiers behind it."""
