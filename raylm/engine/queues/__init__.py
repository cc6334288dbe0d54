"""The scheduling policies of the waiting queue, by their names in the configuration."""

from __future__ import annotations

from collections.abc import Callable

from raylm.config import SchedulerConfig
from raylm.engine.queues.base import Forecast as Forecast
from raylm.engine.queues.base import PriorityQueue
from raylm.engine.queues.base import WaitingQueue as WaitingQueue
from raylm.engine.queues.fair import KEPT_SHARE, FairQueue

POLICIES: dict[str, Callable[[Forecast, SchedulerConfig], WaitingQueue]] = {
    "fair": lambda forecast, config: FairQueue(
        forecast, config.max_num_batched_tokens, config.max_num_seqs // KEPT_SHARE
    ),
    "fcfs": lambda forecast, config: WaitingQueue(),
    "priority": lambda forecast, config: PriorityQueue(),
}


def create_queue(config: SchedulerConfig, forecast: Forecast) -> WaitingQueue:
    """The waiting queue of the configured policy. ``forecast`` gives it estimates from the scheduler."""
    return POLICIES[config.policy](forecast, config)
