"""A rollout function that never returns: it keeps engines up for work from outside."""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

__all__ = ["sleep"]

logger = logging.getLogger(__name__)


def sleep(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Wait until the process is ended; ``--rollout-timeout`` still applies. This wait is the purpose."""
    while True:
        logger.info("sleeping; engines are up at %s:%s", args.sglang_router_ip, args.sglang_router_port)
        time.sleep(3600)
