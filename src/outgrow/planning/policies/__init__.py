"""The policies by name. Each is a file with one class; `auto` is the default."""

from __future__ import annotations

import difflib

from outgrow.errors import UnknownPolicy
from outgrow.planning.policies.accudnn import AccUDNN
from outgrow.planning.policies.auto import Auto
from outgrow.planning.policies.cache import Keep, Lru
from outgrow.planning.policies.checkpoint import Checkpoint
from outgrow.planning.policies.layrub import Layrub
from outgrow.planning.policies.policy import Policy
from outgrow.planning.policies.superneurons import SuperNeurons
from outgrow.planning.policies.vdnn import VdnnAll, VdnnConv, VdnnDyn

__all__ = ["Policy", "find", "policies", "policy_of"]


def policies() -> tuple[str, ...]:
    """The names of all policies."""
    return tuple(policy.name for policy in _all())


def find(name: str) -> Policy:
    """The policy of this name.

    Raises:
        UnknownPolicy: there is none.
    """
    for policy in _all():
        if policy.name == name:
            return policy
    close = difflib.get_close_matches(name, policies(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UnknownPolicy(f"no policy is called {name!r}.{hint} There are: {', '.join(policies())}")


def policy_of(policy: str | Policy) -> Policy:
    """The policy that is meant.

    Raises:
        UnknownPolicy: there is none of this name, or it makes no plans.
    """
    if isinstance(policy, str):
        return find(policy)
    if not callable(getattr(policy, "plan", None)):
        raise UnknownPolicy(f"policy is {type(policy).__name__}: give a name, or what has the method plan(problem)")
    return policy


def _all() -> tuple[Policy, ...]:
    return (
        Auto(),
        Keep(),
        Lru(),
        VdnnAll(),
        VdnnConv(),
        VdnnDyn(),
        SuperNeurons(),
        Layrub(),
        AccUDNN(),
        Checkpoint(),
    )
