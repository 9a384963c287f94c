"""Two processes, one of which is killed while it writes the second checkpoint over the first."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_liger.parallel.checkpoint import module_state, save


class Dies:
    """Kills the process that writes it."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kind, path, meeting = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=2)
    module = torch.nn.Linear(300, 300)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    for value, carried in ((1.0, 1.0), (2.0, Dies())):
        torch.nn.init.constant_(module.weight, value)
        save({"state_dict": module_state(module), "carried": carried}, path, kind, module)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
