"""Outgrow in libraries that own the training loop: one module a library, imported only by those who use it.

`outgrow.integrations.lightning` and `outgrow.integrations.transformers` have a callback each. Accelerate leaves the
loop to the user, so that `outgrow.Session` itself is all that it takes.
"""
