"""`raylm bench`: sends loads to any OpenAI-compatible server, and measures what clients observe."""

from __future__ import annotations

from raylm.bench.loops import closed_loop as closed_loop
from raylm.bench.loops import open_loop as open_loop
from raylm.bench.prompts import WORDS as WORDS
from raylm.bench.prompts import PromptSettings as PromptSettings
from raylm.bench.record import write_trace as write_trace
from raylm.bench.report import LoadResult as LoadResult
from raylm.bench.report import draw as draw
from raylm.bench.report import lines as lines
from raylm.bench.report import table as table
from raylm.bench.run import BenchSettings as BenchSettings
from raylm.bench.run import Progress as Progress
from raylm.bench.run import run_all as run_all
from raylm.simulate import Targets as Targets
