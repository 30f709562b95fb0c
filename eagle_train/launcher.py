"""torchrun, but for what it prints of a process that failed: that process has said its own error."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch(arguments: list[str] | None = None) -> None:
    """Run torchrun; leave with code 1 where a process failed."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(arguments)
    except ChildFailedError:
        sys.exit(1)


if __name__ == "__main__":
    launch()
