"""The search for the splits of one stage's nodes: which there are, what they cost, which fit (PaSE, IPDPS 2021)."""
