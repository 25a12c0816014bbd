"""The model: all rules together."""

from __future__ import annotations

from typing import Final

from kvwitness.tracer.rules.attached import ATTACHED
from kvwitness.tracer.rules.copies import COPIES
from kvwitness.tracer.rules.declare import Rules
from kvwitness.tracer.rules.journal import JOURNAL
from kvwitness.tracer.rules.l1 import L1
from kvwitness.tracer.rules.l2 import L2
from kvwitness.tracer.rules.requests import REQUESTS
from kvwitness.tracer.rules.storage import STORAGE

MODEL: Final[Rules] = JOURNAL.joined(REQUESTS, L1, L2, COPIES, STORAGE, ATTACHED)
