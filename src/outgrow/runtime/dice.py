"""The state of a random generator, kept so that an op draws the very same numbers once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Dice:
    """A generator and the state (5056 bytes on a CPU) that it was in before an op drew from it."""

    generator: torch.Generator
    state: torch.Tensor

    @classmethod
    def before(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dice | None:
        """The dice of a call that is about to run; None where they are no CPU's, whose state we do not know."""
        given = (item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator))
        generator = next(given, torch.default_generator)
        return cls(generator, generator.get_state()) if generator.device.type == "cpu" else None

    def put_back(self) -> None:
        """Whoever draws next draws what the call drew."""
        self.generator.set_state(self.state)

    @contextmanager
    def cast_again(self) -> Iterator[None]:
        """What runs inside draws what the call drew; afterwards the generator is as it was: the user's."""
        users = self.generator.get_state()
        self.put_back()
        try:
            yield
        finally:
            self.generator.set_state(users)
