"""Create a small GPT-2 of `transformers` with its loss, for `autopipe export`.

As a script: write random tokens to tokens.npz.
"""

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 512
SEQUENCE = 64


class NextTokenLoss(torch.nn.Module):
    """A language model that also reads the next tokens and returns the mean cross-entropy."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def factory() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=128, n_layer=6, n_head=4,
                        bos_token_id=None, eos_token_id=None)  # fmt: skip
    module = NextTokenLoss(GPT2LMHeadModel(config)).eval()  # eval: without dropout
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE + 1))
    return module, {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


if __name__ == "__main__":
    text = np.random.default_rng(0).zipf(1.3, (256, SEQUENCE + 1)) % VOCABULARY
    np.savez("tokens.npz", tokens=text[:, :-1], labels=text[:, 1:])
