"""PaSE: the best split of every operator (Elango, IPDPS 2021)."""
