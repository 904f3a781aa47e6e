"""How many bytes an op adds, measured or guessed."""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.runtime.tiers.memory import Request


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that an op adds at its worst moment.

    `certain_bytes` are its outputs at least, and what is known to lie beside them; `likely_bytes` has the workspace
    too, measured or guessed. Where output sizes depend on data, `likely_bytes` is the most so far, and `floor_bytes`
    at least, and never counts as measured, although such an op was `seen` to run. Nothing of them is certain, but
    where the op `is_steady` (nothing says that data decides: nobody wrote down what it makes) and took as much each
    time. `is_open` is what takes a workspace only of what is free, another one each time. `made` are the blocks of
    its results, as far as they are known before it runs.
    """

    certain_bytes: int
    likely_bytes: int
    measured: bool
    depends_on_data: bool = False
    is_open: bool = False
    seen: bool = False
    is_steady: bool = False
    floor_bytes: int = 0
    made: tuple[int, ...] = ()

    def request(self, *, falls_back: bool) -> Request:
        """What the allocator will be asked for; of an op that does not fall back, for its results alone."""
        nbytes = self.likely_bytes if falls_back else self.certain_bytes
        work = nbytes - sum(self.made)
        if work < 0:  # a result took the place of an input
            return Request((), nbytes, falls_back)
        return Request(self.made, work, falls_back)


# What views and ops that write over their input add.
NOTHING = Need(0, 0, measured=True, seen=True)
