"""PyTorch: `codegen` writes programs, `runtime` is what they import, `launcher` starts their ranks
(`elastic_agent` and `rendezvous` over several machines), `checkpoint` reads states, `profiler`
measures, `verification` compares.

It imports ir alone; emission and checkpoint need no torch.
"""
