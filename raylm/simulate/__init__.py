"""`raylm simulate`: simulates a fleet in virtual time, with the same Router, Admission, EngineCore and Scheduler."""

from __future__ import annotations

from raylm.simulate.fleet import Fleet as Fleet
from raylm.simulate.loads import LOADS as LOADS
from raylm.simulate.loads import Load as Load
from raylm.simulate.loads import LoadSettings as LoadSettings
from raylm.simulate.loads import Replay as Replay
from raylm.simulate.recordings import read_recordings as read_recordings
from raylm.simulate.replay import replay as replay
from raylm.simulate.report import Targets as Targets
from raylm.simulate.report import draw as draw
from raylm.simulate.report import figures as figures
from raylm.simulate.report import recorded_table as recorded_table
from raylm.simulate.report import table as table
from raylm.simulate.report import ttft_ms as ttft_ms
from raylm.simulate.simulation import Outcome as Outcome
from raylm.simulate.simulation import simulate as simulate
from raylm.simulate.step_costs import StepCosts as StepCosts
from raylm.simulate.step_costs import fit as fit
from raylm.simulate.step_costs import read_steps as read_steps
from raylm.simulate.trace import Trace as Trace
from raylm.simulate.trace import TraceLine as TraceLine
from raylm.simulate.trace import block_number as block_number
from raylm.simulate.trace import read_lines as read_lines
from raylm.simulate.trace import read_trace as read_trace
