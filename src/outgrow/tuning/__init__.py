"""How large a network or a batch may be, and what it then costs."""
