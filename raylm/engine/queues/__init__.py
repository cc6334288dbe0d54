"""The policies of the waiting queue, by their names in the configuration."""

from __future__ import annotations

from collections.abc import Callable

from raylm.config import SchedulerConfig
from raylm.engine.queues.base import PriorityQueue
from raylm.engine.queues.base import WaitingQueue as WaitingQueue
from raylm.engine.queues.fair import FairQueue
from raylm.engine.sequence import Sequence

POLICIES: dict[str, Callable[[Callable[[Sequence], int], SchedulerConfig], WaitingQueue]] = {
    "fair": lambda cached, config: FairQueue(cached, config.max_num_batched_tokens),
    "fcfs": lambda cached, config: WaitingQueue(),
    "priority": lambda cached, config: PriorityQueue(),
}


def create_queue(config: SchedulerConfig, cached: Callable[[Sequence], int]) -> WaitingQueue:
    """``cached`` tells how many blocks of a sequence that waits are cached, more or less."""
    return POLICIES[config.policy](cached, config)
