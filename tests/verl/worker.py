"""One of two processes (gloo, CPU): runs the named cases and writes what process 0 saw.

python worker.py FOLDER RANK PORT CASE...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(folder: Path, rank: int, port: str, cases: list[str]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    here = Path(__file__).parent
    sys.path[:0] = [
        str(folder)
        for folder in (here, here.parent / "shared_by_frameworks", here.parents[1] / "examples" / "verl")
    ]
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    import cpu_platform

    cpu_platform.register_plain_engine()
    from distributed_cases import CASES

    for case in cases:
        results = CASES[case](folder)
        if rank == 0:
            torch.save(results, folder / f"{case}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
