"""From facts to verdicts: pure functions, one module per kind of claim."""
