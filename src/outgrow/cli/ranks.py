"""`outgrow train --nproc N`: processes that train copies of a network and exchange gradients, a budget in each.

PyTorch's own launcher starts the processes (ranks) on this machine and ends all of them when one fails. Each has its
part of the samples, a session of its own under `DistributedDataParallel`, and its own spill file.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import Any

import psutil
import torch
from rich.console import Console
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from outgrow.cli.datasets import Part
from outgrow.cli.job import Job, OptionError, make_job
from outgrow.cli.options import Options
from outgrow.cli.processes import forking
from outgrow.cli.train import FROM_SUMMARY, check_that_it_fits, run
from outgrow.errors import OutgrowError
from outgrow.units import format_bytes

_EXIT_FAILED = 2
# Ranks that were told to end and take longer are killed.
_CLOSE_SECONDS = 10
# What the error of a rank whose peer has gone says, and no other: the peer's own error is the one to show.
_OF_GLOO = "gloo/"
_MOST_SAID = 4000  # characters; a pipe holds so much of all ranks without a reader

# What a rank adds to its figures that are not the same in all of them.
_OF_EACH_RANK = (
    *FROM_SUMMARY,
    "measured_peak_bytes",
    "highest_peak_bytes",
    "rss_peak_bytes",
    "baseline_rss_bytes",
    "losses",
)
_HIGHEST = ("predicted_peak_bytes", "measured_peak_bytes", "highest_peak_bytes", "rss_peak_bytes")


class RankFailed(OutgrowError):
    """A rank raised an error or was killed; all others were ended."""


@dataclass(frozen=True)
class _LastWords:
    """Why a rank ends: `at` in seconds since the epoch; `is_echo` if it is because another one is gone."""

    rank: int
    at: float
    message: str
    is_echo: bool


def run_ranks(options: Options, job: Job, nproc: int, steps: int, stderr: Console) -> dict[str, Any]:
    """Train in `nproc` processes; the figures under the keys that `outgrow train --nproc N --json` prints.

    Raises:
        OptionError: so many processes make no sense here.
        BudgetTooSmall: not even one process alone would fit the budget of each.
        RankFailed: one of them failed, with its message.
    """
    _refuse_too_many(job, nproc)
    job.batches()  # data that is not there is the first thing to say
    check_that_it_fits(job, stderr)
    # Threads of several processes on one core wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // nproc)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not lead to an address
    results = _launch(options, nproc, steps)
    return _joined([results[rank] for rank in range(nproc)], job)


def _refuse_too_many(job: Job, nproc: int) -> None:
    """Refuse more processes than this machine has cores, or memory, for.

    Raises:
        OptionError: with what there is.
    """
    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise OptionError("--nproc needs torch.distributed with gloo, which this build of PyTorch has not")
    if nproc > _cores():
        raise OptionError(
            f"--nproc {nproc}: there are {_cores()} cores for this process, and each rank computes on one at least"
        )
    memory = psutil.virtual_memory().total
    if job.budget_bytes is not None and nproc * job.budget_bytes > memory:
        raise OptionError(
            f"--budget is for each rank: {nproc} times {format_bytes(job.budget_bytes)} is more than this machine's"
            f" memory of {format_bytes(memory)}"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _launch(options: Options, nproc: int, steps: int) -> dict[int, dict[str, Any]]:
    """Run the ranks to their end; what each returned."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    context = forking()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any port that is free
        local_addr="localhost",
        max_restarts=0,
        start_method=context.get_start_method(),
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else it leaves a folder behind
    )
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_CLOSE_SECONDS))
    last_words: SimpleQueue[_LastWords] = context.SimpleQueue()
    # What the launcher logs of a failure says less than the rank's own words.
    logging.disable(logging.CRITICAL)
    try:
        results: dict[int, dict[str, Any]] = elastic_launch(config, _rank)(last_words, options, steps)
    except ChildFailedError as error:
        raise _failure(last_words, error.failures) from None
    except SignalException as error:
        if error.sigval is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    finally:
        logging.disable(logging.NOTSET)
        last_words.close()
    return results


def _failure(last_words: SimpleQueue[_LastWords], failures: Mapping[int, Any]) -> RankFailed:
    """What went wrong first, as far as the ranks could say it."""
    said: list[_LastWords] = []
    while not last_words.empty():
        said.append(last_words.get())
    killed = {rank: failure.signal_name() for rank, failure in failures.items() if failure.exitcode < 0}
    own = sorted((words for words in said if not words.is_echo), key=lambda words: words.at)
    if own:
        return RankFailed(f"rank {own[0].rank}: {own[0].message}")
    if killed:
        rank, name = next(iter(killed.items()))
        return RankFailed(f"rank {rank} was ended by {name}; the others were ended too")
    if said:
        return RankFailed(f"rank {said[0].rank} lost another one, which ended without a word: {said[0].message}")
    rank, failure = next(iter(failures.items()))
    return RankFailed(f"rank {rank} ended with exit code {failure.exitcode}")


def _rank(last_words: SimpleQueue[_LastWords], options: Options, steps: int) -> dict[str, Any]:
    """One rank, in its process: what it measured."""
    # Ctrl-C reaches all ranks, and the launcher sends it on. What a rank has on the disk has no name: it may go at
    # once, rather than when a collective that waits in C++ returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank = int(os.environ["RANK"])
    try:
        return _train(options, steps)
    except Exception as error:
        is_echo = isinstance(error, RuntimeError) and _OF_GLOO in str(error)
        if not is_echo and not isinstance(error, OutgrowError):
            traceback.print_exc()
        message = " ".join(str(error).split())[:_MOST_SAID] or repr(error)
        if not isinstance(error, OutgrowError):
            message = f"{type(error).__name__}: {message}"
        last_words.put(_LastWords(rank, time.time(), message, is_echo))
        sys.stderr.flush()
        # Not `sys.exit`: threads that wait for other ranks must not keep this one.
        os._exit(_EXIT_FAILED)


def _train(options: Options, steps: int) -> dict[str, Any]:
    distributed.init_process_group("gloo")
    try:
        part = Part(distributed.get_rank(), distributed.get_world_size())
        is_first = part.index == 0

        def wrap(model: nn.Module) -> nn.Module:
            # The same weights in all ranks, but not the same dropout.
            torch.manual_seed(options.seed + part.index)
            return DistributedDataParallel(model, gradient_as_bucket_view=True)

        return run(make_job(options), steps, Console(stderr=True, quiet=not is_first), part=part, wrap=wrap)
    finally:
        distributed.destroy_process_group()


def _joined(results: list[dict[str, Any]], job: Job) -> dict[str, Any]:
    """The figures of all ranks as one: the highest peaks, the mean of the losses, and what they have together."""
    joined = dict(results[0])
    for key in _HIGHEST:
        known = [result[key] for result in results if result[key] is not None]
        joined[key] = max(known, default=None)
    joined["losses"] = [_mean(column) for column in zip(*(result["losses"] for result in results), strict=True)]
    steps = len(joined["losses"])
    return joined | {
        "nproc": len(results),
        "samples": steps * job.shape.batch * job.accumulation * len(results),
        "synchronizations": steps,  # the gradients of all ranks become one once a step
        "ranks": [
            {"rank": rank, **{key: result[key] for key in _OF_EACH_RANK}} for rank, result in enumerate(results)
        ],
    }


def _mean(losses: tuple[float | None, ...]) -> float | None:
    """None where a rank's loss diverged."""
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if len(known) == len(losses) else None
