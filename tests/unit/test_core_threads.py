"""Background threads: torch's operations of theirs run on one thread, those of the others as before."""

from __future__ import annotations

import torch

from specdraft.core.threads import background_thread


def test_only_the_background_thread_is_limited() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with background_thread("test") as pool:
            for _ in range(2):
                assert pool.submit(torch.get_num_threads).result() == 1
            total = pool.submit(lambda: torch.ones(1 << 20).sum()).result()
            assert float(total) == 1 << 20 and pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
