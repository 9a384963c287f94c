"""``python -m lightning_liger``: the ``lightning-liger`` command."""

from __future__ import annotations

import sys

from lightning_liger.cli import main

if __name__ == "__main__":
    sys.exit(main())
