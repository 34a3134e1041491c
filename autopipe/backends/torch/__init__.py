"""The PyTorch backend. `codegen` generates programs, and `runtime` contains the modules that
programs import. `launcher` starts the ranks of a program; `elastic_agent` and `rendezvous` connect
several machines. `checkpoint` stores and reads training states, `profiler` measures costs, and
`verification` compares results.

This package imports only `autopipe.ir` of autopipe's other packages. `codegen` and `checkpoint` do
not require torch.
"""
