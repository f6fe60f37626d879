"""How examples are drawn here."""

from __future__ import annotations

from hypothesis import settings

# Machines of all speeds run this, and examples that fail belong into the tests.
settings.register_profile("ledger", deadline=None, database=None)
settings.load_profile("ledger")
