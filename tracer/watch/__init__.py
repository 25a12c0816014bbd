"""``kvwitness watch``: a running server's requests, rates and disagreements as they come."""
