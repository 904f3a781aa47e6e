"""The state of a random generator, kept so that an op draws the very same numbers once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Dice:
    """A generator and the state that it was in before an op drew from it: 5056 bytes of a CPU's, 16 of a GPU's."""

    generator: torch.Generator
    state: torch.Tensor

    @classmethod
    def before(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dice | None:
        """The dice of a call that is about to run; None where they are of a device whose state we do not know."""
        given = (item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator))
        generator = next(given, None) or _default_generator(args, kwargs)
        known = generator is not None and generator.device.type in ("cpu", "cuda")
        return cls(generator, generator.get_state()) if generator is not None and known else None

    @classmethod
    def all_of(cls, device: torch.device) -> tuple[Dice, ...]:
        """Those that code on a device may draw from by default: the CPU's, and a GPU's own."""
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        return tuple(cls(generator, generator.get_state()) for generator in generators)

    @property
    def were_cast(self) -> bool:
        """Whether somebody has drawn since."""
        return not torch.equal(self.generator.get_state(), self.state)

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


@contextmanager
def all_cast_again(dice: Sequence[Dice]) -> Iterator[None]:
    """The same of several."""
    with ExitStack() as stack:
        for one in dice:
            stack.enter_context(one.cast_again())
        yield


def _default_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """What a call draws from that is given no generator: its device's. None for devices that we do not know."""
    tensors = (item.device for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
    device = kwargs.get("device") or next(tensors, None)
    if device is None or torch.device(device).type == "cpu":
        return torch.default_generator
    place = torch.device(device)
    if place.type != "cuda":
        return None
    index = torch.cuda.current_device() if place.index is None else place.index
    return torch.cuda.default_generators[index]
