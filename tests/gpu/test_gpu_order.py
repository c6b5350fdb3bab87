"""Order of the backward's key items on the sm_90a path (kFewItemsPerSm in hopper/launch.h).

Where the list has few entries, those of all kv heads are taken together; where it has many, one head after
the other. The cases of other tests are small: few entries.
"""

from __future__ import annotations

import pytest
from gpu_cases import check_case, shared_case


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_many_entries(path: int, deterministic: bool) -> None:
    """900 short segments: 1,815 entries a kv head, most surplus; five groups, contexts in two parts: 936."""
    check_case(shared_case([3] * 300, [[1, 2]] * 300, num_heads=8, num_heads_k=4), deterministic)
    check_case(shared_case([200] * 5, [[1] * 60] * 5, num_heads=16, num_heads_k=8), deterministic, 1000)
