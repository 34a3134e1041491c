"""A torch store whose values are signed: whoever reaches its port may write there, and nobody takes
it for ours.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta

from autopipe.backends.torch.torch_interfaces import Store
from autopipe.ir.errors import LaunchError

# Environment variable with the key that a launcher gives its ranks, in hexadecimal.
KEY_VARIABLE = "AUTOPIPE_STORE_KEY"
_SIGNATURE_BYTES = hashlib.sha256().digest_size


class Signer:
    """Signs what the processes of one run tell one another through a store, and knows what they
    have signed.
    """

    def __init__(self, key: bytes, run: str) -> None:
        self.key = key
        self.run = run

    def sign(self, name: str, value: bytes) -> bytes:
        """The value with its signature, good under this name in this run alone."""
        return self._signature(name, value) + value

    def value(self, name: str, signed: bytes) -> bytes:
        """The value. Raises LaunchError where no process of this run signed it under this name."""
        signature = signed[:_SIGNATURE_BYTES]
        value = signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(name, value)):
            raise LaunchError(
                "a value in the rendezvous store lacks a valid signature of this run",
                hint=(
                    "check whether another program can reach the port, or a node uses another "
                    "key: see docs/reference/security.md"
                ),
                where=name,
            )
        return value

    def _signature(self, name: str, value: bytes) -> bytes:
        parts = [part.encode() for part in (self.run, name)]
        text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self.key, text + value, "sha256")


class SignedStore(Store):
    """The store inside with all values signed; numbers that are added up are not. C++ calls these
    methods, too. Who gives one to C++ keeps a reference to it: these methods go with the last one
    of Python's.
    """

    def __init__(self, store: Store, signer: Signer, patience: timedelta) -> None:
        super().__init__()
        self._store = store
        self._signer = signer
        self.set_timeout(patience)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._signer.sign(key, data))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value, when it is there. Raises LaunchError where somebody else has written it."""
        self.wait([key])
        return self._signer.value(key, self._store.get(key))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or self.timeout)  # type: ignore[attr-defined]

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()
