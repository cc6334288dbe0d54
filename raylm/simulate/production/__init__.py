"""`raylm trace`: converts recorded production traces to the lines that `raylm simulate` and `raylm bench` read."""

from __future__ import annotations

from raylm.simulate.production.agents import agents as agents
from raylm.simulate.production.azure import azure as azure
from raylm.simulate.production.mooncake import mooncake as mooncake
from raylm.simulate.production.selection import Selection as Selection
from raylm.simulate.production.servegen import servegen as servegen
