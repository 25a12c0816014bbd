"""The declared model of the cache: for every event what must hold before it, and what holds after it.

The only place in which it is decided whether events fit together. The state is in
:mod:`kvwitness.tracer.ledger`; what a claim needs is in :mod:`kvwitness.tracer.verdicts`.
"""
