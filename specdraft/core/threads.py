"""Threads that work beside the one that computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from threadpoolctl import threadpool_limits


def background_thread(name: str) -> ThreadPoolExecutor:
    """A pool of one thread, for work beside torch's computations; its own operations of torch run on that thread alone.

    Otherwise every such operation would share its work among as many threads again as the main thread's do. On a machine
    whose cores these keep busy, putting them together takes several times as long as the work (measured: 55 us, where an
    operation takes 10).
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=_stay_alone)


def _stay_alone() -> None:
    torch.get_num_threads()  # torch sets a thread's limit when it is first asked for, which would undo the next line
    threadpool_limits(1, user_api="openmp")  # of the calling thread only
