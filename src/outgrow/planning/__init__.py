"""What to do with each saved value: plans, what they will cost, and the policies that make them."""
