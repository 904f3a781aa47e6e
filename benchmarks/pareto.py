"""Time against peak memory: Outgrow at many budgets, and what users would pick instead of it.

    python benchmarks/pareto.py --network resnet-50 --output benchmarks/results

Each peer trains in turns with plain PyTorch and with Outgrow at a budget of just the peak that was measured for the
peer; and Outgrow trains at shares of the plain peak. Figures are ratios of medians of steps that took turns. An
open session keeps large blocks on glibc's heap, which makes plain PyTorch faster as well: so plain runs both as it
comes and with its heap kept, and peers as they come or with their heap kept (`--heap`). Which pages a process was
given makes it some percent faster or slower than its like for as long as it lives: more rounds do not even that out,
but more processes do (`--processes`). Writes JSON and a plot for each network.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from allocator_peak import allocator_peak_bytes
from environment import environment, write
from layout import default_networks, with_suffix
from peers import LEFT_OUT, Peer, peers

from outgrow.cli.interleave import HEAP_KEPT, Run, Setup, SetupFailed, interleave, live_peak_bytes, ratio
from outgrow.cli.options import Options
from outgrow.cli.plot import Line, check_plot_path, draw
from outgrow.networks import find
from outgrow.units import format_bytes

# Batch and input size with which a plain step takes 1 to 10 s on two cores.
_SIZES: Mapping[str, tuple[int, int]] = {
    "resnet-50": (16, 224),
    "vgg-16": (4, 224),
    "unet": (2, 256),
    "gpt-12x384": (8, 256),
    "densenet-121": (16, 224),
    "googlenet": (32, 224),
    "vit-b16": (8, 224),
    "resnet-152": (8, 224),
}
_QUICK_BATCH, _QUICK_SIZE = 2, 64  # to see that all works; the figures mean nothing
_SHARES = (1.0, 0.8, 0.66, 0.53, 0.5, 0.4, 0.35, 0.33, 0.25)
_COMPILE_RATIOS = (0.5, 0.2)
_LIMIT_SECONDS = 180.0  # of one step: torch.compile compiles in its first
# Workers that live at once beside the two plain ones, and what all of them may hold.
_MOST_SESSIONS = 3
_MOST_PEERS = 2
_ROOM_BYTES = 16 << 30

PLAIN, PLAIN_KEPT = "plain", "plain, heap kept"


@dataclass(frozen=True)
class Against:
    """The median of one run's step seconds, and its ratio to those of both kinds of plain steps.

    `same_losses_as_plain` compares all steps that both have run, the warm-up's too.
    """

    seconds: float
    over_plain: float
    over_plain_heap_kept: float
    same_losses_as_plain: bool


@dataclass(frozen=True)
class Managed:
    """Outgrow at one budget. `note` says why there is no time."""

    budget_bytes: int
    share: float
    peak_bytes: int | None = None
    time: Against | None = None
    offloaded_bytes: int | None = None
    recomputed_bytes: int | None = None
    stall_seconds: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Rival:
    """One peer, and Outgrow at a budget of its peak.

    `peak_by` is "ledger" or "allocator" (compiled networks); `ours_over_peer` below 1 says that Outgrow is faster.
    `note` says why there is no figure.
    """

    name: str
    peak_bytes: int | None = None
    peak_by: str | None = None
    share: float | None = None
    time: Against | None = None
    ours: Managed | None = None
    ours_over_peer: float | None = None
    note: str | None = None


class Bench:
    """One network's measurements."""

    def __init__(self, options: Options, given: argparse.Namespace) -> None:
        self.options = options
        self._rounds, self._steps, self._limit = given.rounds, given.steps, given.limit
        self._processes = given.processes
        self._peer_environment = HEAP_KEPT if given.heap == "kept" else {}
        self._policy = given.policy
        self.plain = Setup(PLAIN, options)
        self.plain_kept = Setup(PLAIN_KEPT, options, environment=HEAP_KEPT)
        self.raw: list[dict[str, Any]] = []  # every measured step of every group
        self._say("measuring the peak of a plain step")
        self.plain_peak = live_peak_bytes(self.plain)
        self._say(f"plain peak {format_bytes(self.plain_peak)}")

    def rivals(self, candidates: Sequence[Peer]) -> list[Rival]:
        """Each peer against Outgrow at the peer's peak."""
        found: dict[str, Rival] = {}
        peaks: dict[Peer, int] = {}
        for peer in candidates:
            try:
                peaks[peer] = self._peak(peer)
                self._say(f"{peer.name}: peak {format_bytes(peaks[peer])}")
            except SetupFailed as error:
                found[peer.name] = Rival(peer.name, note=error.failure.message)
                self._say(f"{peer.name}: left out, {error.failure.message}")
        size = max(1, min(_MOST_PEERS, self._workers_that_fit() // 2))
        measured = list(peaks)
        for start in range(0, len(measured), size):
            some = measured[start : start + size]
            ours = {peer: self._managed_setup(peaks[peer]) for peer in some}
            runs = self._run([*map(self._peer_setup, some), *ours.values()])
            for peer in some:
                found[peer.name] = self._rival(peer, peaks[peer], ours[peer], runs)
        return [found[peer.name] for peer in candidates]

    def curve(self, shares: Sequence[float]) -> list[Managed]:
        """Outgrow at shares of the plain peak."""
        found: list[Managed] = []
        size = max(1, min(_MOST_SESSIONS, self._workers_that_fit()))
        for start in range(0, len(shares), size):
            budgets = [int(self.plain_peak * share) for share in shares[start : start + size]]
            setups = [self._managed_setup(budget) for budget in budgets]
            runs = self._run(setups)
            for setup, budget in zip(setups, budgets, strict=True):
                found.append(self._managed(budget, setup, runs))
                self._say(_in_words(f"{self._policy} at {budget / self.plain_peak:.0%}", found[-1]))
        return found

    def _run(self, setups: Sequence[Setup]) -> dict[str, Run]:
        everybody = [self.plain, self.plain_kept, *setups]
        lives = [
            interleave(everybody, self._rounds, self._steps, limit_seconds=self._limit)
            for _ in range(self._processes)
        ]
        runs = {setup.name: _together([life[setup.name] for life in lives]) for setup in everybody}
        for name in (PLAIN, PLAIN_KEPT):
            failure = runs[name].failure
            if failure is not None:
                raise SetupFailed(name, failure)
        self.raw.append({name: [row.to_document() for row in run.rows] for name, run in runs.items()})
        return runs

    def _peak(self, peer: Peer) -> int:
        setup = self._peer_setup(peer)
        if peer.is_compiled:
            return allocator_peak_bytes(setup, self._limit)
        return live_peak_bytes(setup)

    def _peer_setup(self, peer: Peer) -> Setup:
        return Setup(peer.name, self.options, peer.prepare, self._peer_environment)

    def _managed_setup(self, budget: int) -> Setup:
        return Setup(f"{self._policy} at {budget}", replace(self.options, budget=str(budget), policy=self._policy))

    def _rival(self, peer: Peer, peak: int, ours: Setup, runs: Mapping[str, Run]) -> Rival:
        run = runs[peer.name]
        share = peak / self.plain_peak
        managed = self._managed(peak, ours, runs)
        by = "allocator" if peer.is_compiled else "ledger"
        if run.failure is not None:
            return Rival(peer.name, peak, by, share, ours=managed, note=run.failure.message)
        against = None if managed.time is None else ratio(runs, ours.name, peer.name)
        rival = Rival(peer.name, peak, by, share, _against(run, runs), managed, against)
        assert rival.time is not None
        self._say(
            f"{peer.name}: {rival.time.over_plain:.3f} x plain, {rival.time.over_plain_heap_kept:.3f} x with its heap"
            f" kept; {_in_words(f'{self._policy} at its peak', managed)}"
            + ("" if against is None else f", {against:.3f} x the peer")
        )
        return rival

    def _managed(self, budget: int, setup: Setup, runs: Mapping[str, Run]) -> Managed:
        run = runs[setup.name]
        share = budget / self.plain_peak
        if run.failure is not None:
            return Managed(budget, share, note=run.failure.message)
        last = run.summaries[-1]
        return Managed(
            budget_bytes=budget,
            share=share,
            peak_bytes=run.peak_bytes,
            time=_against(run, runs),
            offloaded_bytes=last.offloaded_bytes,
            recomputed_bytes=last.recomputed_bytes,
            stall_seconds=last.stall_seconds,
        )

    def _workers_that_fit(self) -> int:
        """Beside the two plain ones. A heap that is kept holds somewhat more than the live bytes."""
        return int(_ROOM_BYTES / (self.plain_peak * 1.3 + (400 << 20))) - 2

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.options.network}: {text}", flush=True)


def _together(lives: Sequence[Run]) -> Run:
    """One set-up in several processes, one after the other: all its measured steps.

    Its losses are the same in each; where they are not, those that stand out.
    """
    first = lives[0]
    failed = next((life for life in lives if life.failure is not None), None)
    if failed is not None:
        return failed
    losses = next((life.losses for life in lives if life.losses != first.losses), first.losses)
    return replace(first, rows=tuple(row for life in lives for row in life.rows), losses=losses)


def _against(run: Run, runs: Mapping[str, Run]) -> Against:
    common = min(len(run.losses), len(runs[PLAIN].losses))
    return Against(
        seconds=run.seconds,
        over_plain=run.seconds / runs[PLAIN].seconds,
        over_plain_heap_kept=run.seconds / runs[PLAIN_KEPT].seconds,
        same_losses_as_plain=run.losses[:common] == runs[PLAIN].losses[:common],
    )


def _in_words(name: str, managed: Managed) -> str:
    if managed.time is None or managed.peak_bytes is None:
        return f"{name} does not work: {managed.note}"
    return (
        f"{name}: {managed.time.over_plain:.3f} x plain, {managed.time.over_plain_heap_kept:.3f} x with its heap"
        f" kept, peak {format_bytes(managed.peak_bytes)}"
    )


def lines(plain_peak: int, rivals: Sequence[Rival], curve: Sequence[Managed], policy: str) -> list[Line]:
    """What the plot shows: times over those of plain steps."""
    points = [*curve, *(rival.ours for rival in rivals if rival.ours is not None)]
    ours = tuple(
        (point.peak_bytes / plain_peak, point.time.over_plain)
        for point in points
        if point.peak_bytes is not None and point.time is not None
    )
    found = [Line(f"Outgrow, {policy}", policy, ours, measured=True)]
    for rival in rivals:
        if rival.peak_bytes is not None and rival.time is not None:
            place = ((rival.peak_bytes / plain_peak, rival.time.over_plain),)
            found.append(Line(rival.name, rival.name, place, measured=True, joined=False))
    return found


def run(name: str, given: argparse.Namespace) -> None:
    """Measure one network and write its figures."""
    network = find(name)
    batch, image_size = _SIZES.get(network.name, (4, network.image_size))
    if given.quick:
        batch, image_size = _QUICK_BATCH, _QUICK_SIZE
    options = Options(
        network.name,
        data="synthetic",
        batch=given.batch or batch,
        image_size=given.image_size or image_size,
        channels_last=given.channels_last,
        momentum=given.momentum,
    )
    began = time.perf_counter()
    bench = Bench(options, given)
    rivals: list[Rival] = []
    curve: list[Managed] = []
    some = "-compiled" if given.only == "compiled" else ""
    target = with_suffix(given.output / f"pareto-{network.name}{some}.json", given.channels_last)
    order = ", channels last" if options.channels_last else ""
    title = f"{network.name}, batch {options.batch}, size {options.image_size}{order}: over plain PyTorch as it comes"

    def save() -> None:
        result = {
            "network": network.name,
            "batch": options.batch,
            "image_size": options.image_size,
            "momentum": options.momentum,
            "channels_last": options.channels_last,
            "policy": given.policy,
            "heap_of_peers": given.heap,
            "rounds": given.rounds,
            "steps_a_turn": given.steps,
            "processes": given.processes,
            "plain_peak_bytes": bench.plain_peak,
            "peers": [asdict(rival) for rival in rivals],
            "curve": [asdict(point) for point in curve],
            "left_out": LEFT_OUT,
            "environment": environment(),
            "steps": bench.raw,
        }
        write(target, result)
        draw(target.with_suffix(".png"), title, lines(bench.plain_peak, rivals, curve, given.policy))

    if given.only != "curve":
        rivals = bench.rivals(
            [peer for peer in peers(given.compile_ratios) if peer.is_compiled or given.only != "compiled"]
        )
        save()
    if given.only in (None, "curve"):
        curve = bench.curve(given.shares)
        save()
    print(f"{network.name}: {time.perf_counter() - began:.0f} s, {target}", flush=True)


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", help=f"one or more; default: {', '.join(_SIZES)}")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--channels-last", action="store_true", help="all in that memory format; no gpt by default")
    parser.add_argument("--momentum", type=float, help="of sgd; default: 0.9")
    parser.add_argument("--policy", default="auto", help="Outgrow's policy")
    parser.add_argument("--rounds", type=int, default=4, help="how often all take turns")
    parser.add_argument("--steps", type=int, default=1, help="measured steps of a turn")
    parser.add_argument("--processes", type=int, default=1, help="how often all of that is done in new processes")
    parser.add_argument("--shares", type=float, nargs="+", default=_SHARES, help="budgets over the plain peak")
    parser.add_argument("--compile-ratios", type=float, nargs="*", default=_COMPILE_RATIOS)
    parser.add_argument("--limit", type=float, default=_LIMIT_SECONDS, help="seconds that one step may take at most")
    parser.add_argument("--heap", choices=("kept", "default"), default="default", help="glibc's settings for peers")
    parser.add_argument("--only", choices=("peers", "compiled", "curve"), help="peers, those by torch.compile, ours")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="a folder")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, to see that all works")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    check_plot_path(given.output / "pareto.png")
    for name in given.network or default_networks(_SIZES, given.channels_last):
        run(name, given)


if __name__ == "__main__":
    main()
