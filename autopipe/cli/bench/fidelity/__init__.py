"""`autopipe bench fidelity`: every plan that is weighed for a model, predicted and then run on this machine."""
