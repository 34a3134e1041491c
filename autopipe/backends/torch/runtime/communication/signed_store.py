"""A torch store whose values are signed. Any process that reaches the port of a rendezvous store
may write to it; the signature shows which values come from the processes of this run, that is, of
one launch on all its nodes.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta

from autopipe.backends.torch.torch_interfaces import Store
from autopipe.ir.errors import LaunchError

# Name of the environment variable with the signing key, in hexadecimal. The launcher sets the
# variable for its ranks.
KEY_VARIABLE = "AUTOPIPE_STORE_KEY"
_SIGNATURE_BYTES = hashlib.sha256().digest_size


class Signer:
    """Signs values that the processes of one run, a launch on all its nodes, exchange through a
    store, and verifies the signatures. `key` is the secret of the run; `run` is its name, which is
    part of every signature.
    """

    def __init__(self, key: bytes, run: str) -> None:
        self.key = key
        self.run = run

    def sign(self, name: str, value: bytes) -> bytes:
        """Return `value` with its signature in front. The signature (HMAC-SHA256) is valid only for
        this run and for the store key `name`.
        """
        return self._signature(name, value) + value

    def verified_value(self, name: str, signed: bytes) -> bytes:
        """Return the value in `signed`, which `sign` has returned. Raise LaunchError if the
        signature is not valid for this run and the store key `name`.
        """
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
        """Return the HMAC-SHA256 of the run, the store key `name` and the value. The lengths of the
        first two are included, so that different triples never give equal input.
        """
        parts = [part.encode() for part in (self.run, name)]
        text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self.key, text + value, "sha256")


class SignedStore(Store):
    """A store that signs every value before it writes the value to another store, and verifies the
    signature when it reads. Counters that `add` maintains are not signed.

    C++ code of torch calls these methods too. It holds only the C++ part of the object, and the
    methods exist only while a Python reference to the object exists. So code that passes a
    SignedStore to C++ must keep a reference.
    """

    def __init__(self, store: Store, signer: Signer, patience: timedelta) -> None:
        """Wrap `store`. `patience` is the default time-out of `wait`, `get` and `multi_get`."""
        super().__init__()
        self._store = store
        self._signer = signer
        self.set_timeout(patience)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._signer.sign(key, data))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait until `key` exists and return its value. Raise LaunchError if no process of this run
        has signed the value for this key.
        """
        self.wait([key])
        return self._signer.verified_value(key, self._store.get(key))

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
