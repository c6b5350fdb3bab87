"""One of two processes (gloo, CPU): runs the named cases, both sides, and writes what process 0 saw.

python worker.py FOLDER RANK PORT CASE...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(folder: Path, rank: int, port: str, cases: list[str]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port, ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    sys.path.insert(0, str(Path(__file__).parents[1] / "shared_by_frameworks"))
    import torch

    torch.set_num_threads(1)
    from distributed_cases import CASES

    for case in cases:
        results = {side: CASES[case](side, folder) for side in ("parent", "shared")}
        if rank == 0:
            torch.save(results, folder / f"{case}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
