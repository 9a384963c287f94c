"""What every process that measures imports, imported once by the server that such processes are forked from.

Importing must not wake the CUDA driver, which does not survive a fork: Liger's package asks for a device when it is
imported, and is left to each process.
"""

from __future__ import annotations

import lightning_liger.bench.worker
import lightning_liger.callback
import lightning_liger.strategy  # noqa: F401
