"""The PyTorch backend. `codegen` generates programs and `runtime` has the modules that programs
import. `launcher` starts the ranks, with `elastic_agent` and `rendezvous` for several machines.
`checkpoint` reads saved states, `profiler` measures, and `verification` compares results.

This package imports only `autopipe.ir` of autopipe's other packages. `codegen` and `checkpoint`
need no torch.
"""
