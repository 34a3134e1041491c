"""The state that nodes share: written by those who have the key, in order, and by no one else."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _NodeDesc,
)

from autopipe.backends.torch import rendezvous
from autopipe.backends.torch.rendezvous import (
    Node,
    RendezvousConfig,
    RendezvousHandler,
    SharedState,
    check_nodes,
    missing_nodes_text,
)
from autopipe.backends.torch.runtime.communication.signed_store import SignedStore, Signer
from autopipe.backends.torch.runtime.job import LOOPBACK, Endpoint
from autopipe.ir.errors import ConfigurationError, LaunchError

SETTINGS = RendezvousSettings("run", 2, 2, RendezvousTimeout(), timedelta(seconds=5), 3)
SIGNER = Signer(b"k" * 32, "run")
STATE = "autopipe/state"
SOON = timedelta(seconds=5)


def node(store: HashStore, signer: Signer = SIGNER) -> SharedState:
    """A node of the run."""
    return SharedState(store, signer, SETTINGS)


def joined(holder: SharedState, number: int) -> bool | None:
    """Let the node take part, and write that."""
    here = _NodeDesc("10.0.0.1", 7, number)
    holder.state.participants[here] = number
    holder.state.last_heartbeats[here] = datetime.now(UTC)
    holder.mark_dirty()
    return holder.sync()


def test_what_one_node_writes_another_reads() -> None:
    store = HashStore()
    one = node(store)
    two = node(store)
    one.state.wait_list.add(_NodeDesc("10.0.0.2", 8, 0))
    one.state.redundancy_list.add(_NodeDesc("fd00::3", 9, 0))
    one.state.deadline = datetime.now(UTC)
    one.state.round = 3
    assert joined(one, 0)
    two.sync()
    assert vars(two.state) == vars(one.state)
    assert two.sync() is None, "read a moment ago"


def test_who_writes_after_another_has_takes_what_that_one_wrote() -> None:
    store = HashStore()
    one = node(store)
    two = node(store)
    assert joined(one, 0)
    assert not joined(two, 1)
    assert list(two.state.participants.values()) == [0]
    assert joined(two, 1)
    assert not joined(one, 2)
    assert list(one.state.participants.values()) == [0, 1]


@pytest.mark.parametrize(
    "forged",
    [
        lambda held: pickle.dumps(1).hex(),
        lambda held: "gASVBAAAAAAAAABLAS4=",
        lambda held: held[:-2] + "00",
        lambda held: Signer(b"other" * 8, "run").sign(STATE, b"{}").hex(),
        lambda held: Signer(SIGNER.key, "other run").sign(STATE, b"{}").hex(),
        lambda held: SIGNER.sign("another name", b"{}").hex(),
        lambda held: "",
    ],
    ids=["pickle", "base64", "changed", "key", "run", "name", "nothing"],
)
def test_what_no_node_of_the_run_wrote_is_refused(forged: Callable[[str], str]) -> None:
    store = HashStore()
    one = node(store)
    assert joined(one, 0)
    store.set(STATE, forged(store.get(STATE).decode()))
    with pytest.raises(RendezvousStateError, match="lacks a valid signature of this run"):
        joined(one, 1)


def test_an_earlier_state_that_is_put_back_is_refused() -> None:
    store = HashStore()
    one = node(store)
    assert joined(one, 0)
    earlier = store.get(STATE).decode()
    assert joined(one, 1)
    store.set(STATE, earlier)
    with pytest.raises(RendezvousStateError, match="reset to an earlier state"):
        joined(one, 2)


def test_values_of_a_signed_store_are_good_under_their_names_alone() -> None:
    raw = HashStore()
    store = SignedStore(raw, SIGNER, SOON)
    through = PrefixStore("attempt", store)  # C++, as gloo asks
    through.set("address", "10.0.0.1")
    assert through.get("address") == store.get("attempt/address") == b"10.0.0.1"
    raw.set("attempt/other", raw.get("attempt/address").decode("latin-1"))
    raw.set("attempt/address", "10.0.0.66")
    for name in ("address", "other"):
        with pytest.raises(LaunchError, match="lacks a valid signature of this run"):
            through.get(name)


def test_a_node_with_another_key_is_told() -> None:
    host = RendezvousHandler(RendezvousConfig(nodes=2, endpoint=f"{LOOPBACK}:0"))
    assert isinstance(host.raw, TCPStore)
    place = RendezvousConfig(nodes=2, endpoint=f"{LOOPBACK}:{host.raw.port}")
    with pytest.raises(LaunchError, match="lacks a valid signature of this run") as found:
        RendezvousHandler(place)
    assert "a node uses another key" in found.value.hint


def test_a_node_with_another_key_ends_the_nodes_that_wait() -> None:
    host = RendezvousHandler(RendezvousConfig(nodes=2, endpoint=f"{LOOPBACK}:0", join_s=60))
    assert isinstance(host.raw, TCPStore)
    with pytest.raises(LaunchError):
        RendezvousHandler(RendezvousConfig(nodes=2, endpoint=f"{LOOPBACK}:{host.raw.port}"))
    with pytest.raises(RendezvousStateError, match="a node uses another rendezvous key"):
        host.next_rendezvous()


def test_a_node_with_another_key_does_not_end_a_run() -> None:
    store = HashStore()
    one = node(store)
    one.state.complete = True
    assert joined(one, 0)
    store.set("autopipe/rejected", "1")
    assert joined(one, 1)


def test_a_port_of_a_silent_process_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LOCAL_STORE_ANSWER_S", 1.0)
    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} is in use by another process"):
            RendezvousHandler(RendezvousConfig(nodes=2, endpoint=f"{LOOPBACK}:{port}", join_s=600))


def test_the_time_to_start_limits_the_wait_for_a_silent_process() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        elsewhere = Endpoint(LOOPBACK, port, "127.0.0.2")
        with pytest.raises(
            LaunchError, match=f"the rendezvous node did not answer at {LOOPBACK}:{port}"
        ):
            rendezvous._make_or_join_store(elsewhere, timedelta(seconds=1))


def test_no_thread_is_left_where_nobody_listens() -> None:
    # A thread that returned from torch while Python shut down would abort the process.
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        LaunchError, match=f"the rendezvous node did not answer at {LOOPBACK}:{port}"
    ):
        rendezvous._make_or_join_store(Endpoint(LOOPBACK, port, "127.0.0.2"), timedelta(seconds=1))
    assert "autopipe rendezvous" not in [thread.name for thread in threading.enumerate()]


def test_no_thread_is_left_where_a_listener_closes_each_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_LOCAL_STORE_ANSWER_S", 1.0)
    with socket.create_server((LOOPBACK, 0)) as closing:
        port = closing.getsockname()[1]

        def close_each() -> None:
            with contextlib.suppress(OSError):
                while True:
                    closing.accept()[0].close()

        threading.Thread(target=close_each, daemon=True).start()
        with pytest.raises(LaunchError, match=f"port {port} is in use by another process"):
            rendezvous._make_or_join_store(
                Endpoint(LOOPBACK, port, LOOPBACK), timedelta(seconds=600)
            )
        assert "autopipe rendezvous" not in [thread.name for thread in threading.enumerate()]
        closing.shutdown(socket.SHUT_RDWR)


def of(number: int | None, host: str, ranks: int = 4, gpus: int = 4) -> Node:
    return Node(number, "10.0.0.1", host, ranks, gpus)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([of(0, "a"), of(0, "b")], "a and b both have node rank 0"),
        ([of(0, "a"), of(None, "b")], "only one of a and b sets its node rank"),
        ([of(0, "a"), of(1, "b", ranks=2)], "a starts 4 ranks, but node b starts 2"),
        ([of(0, "a"), of(1, "b", gpus=1)], "a has 4 GPUs for 4 ranks, b has 1"),
        ([of(0, "a", gpus=0), of(1, "b", gpus=8)], "a has 0 GPUs for 4 ranks, b has 8"),
    ],
)
def test_nodes_that_do_not_fit_one_another(nodes: list[Node], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_nodes(nodes)


def test_nodes_that_fit_come_in_the_order_of_their_numbers() -> None:
    check_nodes([of(None, "a"), of(None, "b", gpus=8)])
    check_nodes([of(0, "a", gpus=2), of(1, "b", gpus=0)])
    nodes = [of(10, "a"), of(2, "b")]
    assert [Node.parse(text) for text in sorted(map(str, nodes))] == [nodes[1], nodes[0]]


def test_missing_nodes_are_named_as_far_as_they_are_known() -> None:
    place = RendezvousConfig(3, hosts=("a", "b", "c"))
    assert (
        missing_nodes_text(place, [of(1, "b")]) == "node 0 (a), 2 (c) of 3 never came; there are: b"
    )
    assert (
        missing_nodes_text(RendezvousConfig(3), [of(1, "b"), of(0, "a")])
        == "node 2 of 3 never came; there are: a, b"
    )
    assert missing_nodes_text(RendezvousConfig(3), [of(None, "b")]) == "1 of 3 nodes came: b"


def test_an_address_of_another_machine_is_no_local_one() -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1 is not the first address"):
        RendezvousHandler(
            RendezvousConfig(nodes=2, endpoint=f"{LOOPBACK}:0", local_address="192.0.2.1")
        )
