"""What five documents claim about flash attention, measured. lab.claims.claim defines a claim."""
