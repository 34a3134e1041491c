"""TePDist: stages, the mesh of each, micro-batches and splits in one search (Alibaba PAI, 2023)."""
