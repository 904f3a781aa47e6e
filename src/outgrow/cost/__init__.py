"""How long things take and how much they hold: profiles of devices, estimates, measurements."""
