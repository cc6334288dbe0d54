"""Records the calls and decisions of a Scheduler for `raylm simulate`."""

from raylm.engine.recording.recorded_scheduler import columns as columns
from raylm.engine.recording.recorded_scheduler import create_scheduler as create_scheduler
