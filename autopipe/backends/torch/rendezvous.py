"""Rendezvous of the nodes of a launch: how they find one another and number their ranks. It uses
torch elastic's protocol, and keeps the shared state as signed JSON in a TCPStore.

Elastic's own `c10d` backend listens on all network interfaces and unpickles data from the store.
The store of this module listens on one address, and its data are never unpickled.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)

from autopipe.backends.torch.runtime.communication.signed_store import SignedStore, Signer
from autopipe.backends.torch.runtime.job import (
    LOOPBACK,
    Endpoint,
    interface_of,
    parse_endpoint,
    socket_family,
)
from autopipe.backends.torch.runtime.watch.heartbeat import DEFAULT_TIMEOUTS
from autopipe.backends.torch.torch_interfaces import (
    BackendRendezvousStateHolder,
    NodeDesc,
    NodeDescGenerator,
    RendezvousState,
    Store,
    TCPStore,
)
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.words import plural

_STORE_ANSWER_S = 60
_HEARTBEAT_INTERVAL_S = 5
_MAX_MISSED_HEARTBEATS = 3
"""Number of consecutive heartbeats that a node may miss before elastic removes it from the
rendezvous.
"""
_POLL_INTERVAL_S = 1.0
_RUN_KEY = "autopipe/run"
_STATE_KEY = "autopipe/state"
_REJECTED_KEY = "autopipe/rejected"
"""Key of the store that a node with a different secret key sets before it ends. Its value is not
signed.
"""
_LOCAL_STORE_ANSWER_S = 3.0
"""Seconds within which a store that another process on this machine serves must answer."""
_REMOTE_STORE_ANSWER_S = 10.0
"""Seconds within which a store on another machine must answer, once its port accepts connections.
"""
_CONNECT_RETRY_S = 0.2
"""Seconds between two attempts to connect to a port where nobody listens yet."""


@dataclass(frozen=True, slots=True)
class RendezvousConfig:
    """Configuration of the rendezvous on one node: its address, its secret key, and the identity of
    the node.
    """

    nodes: int = 1
    endpoint: str = ""
    """Address of the store, HOST:PORT. Not needed for a single node, whose store listens on the
    loopback interface.
    """
    name: str = "autopipe"
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    node: int | None = None
    """Number of this node, or None if the user has not set it. Ranks are numbered in the order of
    the nodes.
    """
    local_address: str = ""
    """Address of this node for the other nodes; "" for the address from which this node reaches the
    endpoint.
    """
    gpus: int = 0
    """Number of GPUs of this node that ranks may use."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes by number; empty if no job manager provides them."""
    join_s: float = DEFAULT_TIMEOUTS.start_s


@dataclass(frozen=True, slots=True)
class Node:
    """Description of a node that the other nodes read. Its text is elastic's name of the node:
    elastic sorts the nodes by this text, and numbers the ranks in this order.
    """

    number: int | None
    address: str
    host: str
    ranks: int
    gpus: int

    def __str__(self) -> str:
        number = "-" if self.number is None else f"{self.number:06d}"
        return f"{number} {self.address} {self.host} {self.ranks} {self.gpus}"

    @staticmethod
    def parse(text: str) -> Node:
        """Return the node that a text of `Node.__str__` describes."""
        number, address, host, ranks, gpus = text.split(" ")
        return Node(None if number == "-" else int(number), address, host, int(ranks), int(gpus))


def check_nodes(nodes: Sequence[Node]) -> None:
    """Raise ConfigurationError if the nodes do not fit together: two nodes have the same number,
    only some nodes have a number, their numbers of ranks differ, or only some nodes have a GPU for
    each of their ranks.
    """
    seen: dict[int | None, Node] = {}
    first = nodes[0]
    for node in nodes:
        if node.number is not None and node.number in seen:
            of_both = f"{seen[node.number].host} and {node.host} both have node rank {node.number}"
            raise ConfigurationError(
                of_both, hint="set --node-rank to a different number on each node"
            )
        if (node.number is None) != (first.number is None):
            raise ConfigurationError(
                f"only one of {first.host} and {node.host} sets its node rank",
                hint="set --node-rank on all nodes, or on none",
            )
        if node.ranks != first.ranks:
            unequal = (
                f"node {first.host} starts {first.ranks} {plural(first.ranks, 'rank')}, but node "
                f"{node.host} starts {node.ranks}"
            )
            raise ConfigurationError(unequal, hint="set --nproc-per-node to one value on all nodes")
        if (node.gpus < node.ranks) != (first.gpus < first.ranks):
            unequal = (
                f"{first.host} has {first.gpus} {plural(first.gpus, 'GPU')} for {first.ranks} "
                f"{plural(first.ranks, 'rank')}, {node.host} has {node.gpus}"
            )
            hint = (
                "look at CUDA_VISIBLE_DEVICES and nvidia-smi there, or give --device cpu on all "
                "nodes"
            )
            raise ConfigurationError(unequal, hint=hint)
        seen[node.number] = node


def missing_nodes_text(place: RendezvousConfig, came: Sequence[Node]) -> str:
    """Return a line for an error that names the nodes that did not join. `came` are the nodes that
    joined. If the nodes have no numbers, the line names those that joined.
    """
    numbers = {node.number for node in came}
    here = ", ".join(sorted(node.host for node in came)) or "none"
    if None in numbers or not came:
        return f"{len(came)} of {place.nodes} {plural(place.nodes, 'node')} came: {here}"
    missing = [number for number in range(place.nodes) if number not in numbers]
    names = [
        f"{each} ({place.hosts[each]})" if each < len(place.hosts) else str(each)
        for each in missing
    ]
    return f"node {', '.join(names)} of {place.nodes} never came; there are: {here}"


class RendezvousHandler(DynamicRendezvousHandler):
    """Elastic's dynamic rendezvous, with a store that listens on one address only."""

    def __init__(self, place: RendezvousConfig, ranks: int = 1) -> None:
        endpoint = (
            parse_endpoint(place.endpoint) if place.endpoint else Endpoint(LOOPBACK, 0, LOOPBACK)
        )
        if place.local_address:
            # `interface_of` raises an error if the address does not belong to this machine.
            interface_of(place.local_address)
        self.address = place.local_address or endpoint.own
        """Address of this node. Its ranks listen on no other address."""
        self._place = place
        join = timedelta(seconds=place.join_s)
        self.raw = _make_or_join_store(endpoint, join)
        """The store of the rendezvous, which holds the nodes' shared state."""
        self.signer = Signer(place.key, _agree_on_run_name(self.raw, place))
        patience = RendezvousTimeout(join=join)
        alive = timedelta(seconds=_HEARTBEAT_INTERVAL_S)
        settings = RendezvousSettings(
            self.signer.run, place.nodes, place.nodes, patience, alive, _MAX_MISSED_HEARTBEATS
        )
        node = _NODE_DESCRIPTIONS.generate(
            str(Node(place.node, self.address, socket.gethostname(), ranks, place.gpus))
        )
        store = SignedStore(self.raw, self.signer, timedelta(seconds=_STORE_ANSWER_S))
        self._holder = SharedState(self.raw, self.signer, settings)
        super().__init__(node, settings, "autopipe", store, self._holder)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes have joined, and return the result of the rendezvous. Raise
        ConfigurationError if the nodes do not fit together (`check_nodes`), and LaunchError if some
        nodes do not join in time. For other failures, such as a node with a different key, raise
        RendezvousError of torch's elastic package.
        """
        try:
            found: RendezvousInfo = super().next_rendezvous()
        except RendezvousTimeoutError as error:
            came = [Node.parse(text) for text in sorted(self._holder.came)]
            hint = "look at its launch; --start-timeout allows more time"
            raise LaunchError(missing_nodes_text(self._place, came), hint=hint) from error
        check_nodes([Node.parse(each.addr) for each in sorted(self._holder.state.participants)])
        master = found.bootstrap_store_info
        assert master is not None, "ranks use a store that is made here"
        # `replace` creates a copy, because elastic still needs the original object in its next
        # round.
        master = replace(master, master_addr=Node.parse(master.master_addr).address)
        return RendezvousInfo(found.store, found.rank, found.world_size, master)

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait to join. Return 0 if the node that hosts the store
        has ended, because then the ranks themselves report the lost node.
        """
        try:
            return int(super().num_nodes_waiting())
        except RendezvousConnectionError:
            return 0

    @property
    def use_agent_store(self) -> bool:
        """True, so that the ranks use the store that elastic's agent creates."""
        return True

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        """Return the agent's store for the ranks, which listens on the address of this node
        only.
        """
        made = _listen_with_store(self.address, master_port)
        if made is None:
            raise LaunchError("no port is free for the rendezvous store", where=self.address)
        return made


_NODE_DESCRIPTIONS = NodeDescGenerator()


def _make_or_join_store(endpoint: Endpoint, patience: timedelta) -> TCPStore:
    """Return the store of the rendezvous, created by this process or by another one.

    This process creates the store if the endpoint's address belongs to this machine and its port is
    free. Otherwise it connects to the store at the endpoint. Raise LaunchError if the port is in
    use by a process that is not a store, or if no store answers within `patience`.
    """
    here = endpoint.own == endpoint.address
    made = _listen_with_store(endpoint.address, endpoint.port) if here else None
    if made is None:
        where = f"{endpoint.address}:{endpoint.port}"
        seconds = patience.total_seconds()
        try:
            if here:
                made = _connect_store(endpoint, min(seconds, _LOCAL_STORE_ANSWER_S))
            else:
                _wait_for_listener(endpoint, seconds)
                made = _connect_store(endpoint, min(seconds, _REMOTE_STORE_ANSWER_S))
        except (RuntimeError, TimeoutError) as error:
            if here:
                message = f"port {endpoint.port} is in use by another process"
                raise LaunchError(
                    message, hint="choose another port with --rdzv-endpoint HOST:PORT", where=where
                ) from error
            hint = (
                "check that the node with this address has started, that no other program uses "
                "the port, and that no firewall blocks it; wait longer with --start-timeout"
            )
            raise LaunchError(
                f"the rendezvous node did not answer at {where}", hint=hint
            ) from error
    made.set_timeout(timedelta(seconds=_STORE_ANSWER_S))
    return made


def _wait_for_listener(endpoint: Endpoint, seconds: float) -> None:
    """Wait until a process accepts connections at `endpoint`. Raise TimeoutError if none does
    within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no process listens at {endpoint.address}:{endpoint.port}")
        try:
            socket.create_connection((endpoint.address, endpoint.port), timeout=left).close()
        except OSError:
            time.sleep(min(_CONNECT_RETRY_S, left))
        else:
            return


def _connect_store(endpoint: Endpoint, seconds: float) -> TCPStore:
    """Return a client of the store at `endpoint`, whose port must accept connections. Raise
    RuntimeError or TimeoutError if no store answers within `seconds`.

    If the listener never answers, torch waits without a limit and ignores Ctrl-C. The connection is
    therefore made in a thread, which is abandoned if no answer comes.

    A thread that returns from torch while Python shuts down aborts the process. If torch gives up
    by itself, it does so after at most twice its limit, because the pauses between its attempts
    grow. This function waits that long, so that only a thread that never returns is abandoned.
    """
    found: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            limit = timedelta(seconds=seconds)
            found.set_result(
                TCPStore(endpoint.address, endpoint.port, is_master=False, timeout=limit)
            )
        except RuntimeError as error:
            found.set_exception(error)

    threading.Thread(target=connect, name="autopipe rendezvous", daemon=True).start()
    return found.result(2 * seconds + 1)


def _listen_with_store(address: str, port: int) -> TCPStore | None:
    """Return a new store that this process serves on `address` and `port`, and on no other address.
    Return None if the address cannot be bound, for example because another process uses the port.
    Port 0 selects any free port.
    """
    listener = socket.socket(socket_family(address), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _agree_on_run_name(store: Store, place: RendezvousConfig) -> str:
    """Return the random name of the run, which the first node writes to the store and all nodes
    use. If the first node signed the name with another secret key than this node's, note this in
    the store for the other nodes and raise LaunchError.
    """
    signer = Signer(place.key, place.name)
    mine = signer.sign(_RUN_KEY, secrets.token_hex(16).encode())
    # `compare_set` of the store supports text only, so the signed bytes are converted to
    # hexadecimal digits.
    found = store.compare_set(_RUN_KEY, "", mine.hex())
    try:
        return signer.verified_value(_RUN_KEY, _decode_hex(found)).decode()
    except LaunchError:
        store.set(_REJECTED_KEY, "1")
        raise


def _decode_hex(text: bytes) -> bytes:
    """Return the bytes that hexadecimal digits encode, or b"" if the text is not hexadecimal."""
    try:
        return bytes.fromhex(text.decode())
    except ValueError:
        return b""


class SharedState(BackendRendezvousStateHolder):
    """The state that the nodes share through the store: the participants, the waiting nodes, and
    the time of each node's last heartbeat.

    Each state has a number, which increases by one with each change. A node rejects a state with a
    lower number than the latest one, so an attacker cannot restore an earlier state.
    """

    def __init__(self, store: Store, signer: Signer, settings: RendezvousSettings) -> None:
        super().__init__(None, settings)  # type: ignore[arg-type]
        self._store = store
        self._signer = signer
        self._held = b""
        """Latest state read from the store, with its signature."""
        self._number = 0
        self.came: set[str] = set()
        """Nodes, as text, that have joined in the current round of the rendezvous."""
        self._round = 0
        self._met = False
        """True once the rendezvous of all nodes was complete."""

    def sync(self) -> bool | None:
        """Write the state to the store if this node has changed it, then replace it with the state
        that the store holds.

        Return True if the state was written, False if it was not written because another node wrote
        first, and None if there was nothing to do. Raise RendezvousStateError if the stored state
        has a wrong signature or is older than one that this node has read, or if a node used
        another key.
        """
        written: bool | None = None
        if self._dirty:
            form = _state_to_json(self._state) | {"number": self._number + 1}
            ours = self._signer.sign(_STATE_KEY, json.dumps(form).encode()).hex()
            held = _call_store(
                lambda: self._store.compare_set(_STATE_KEY, self._held.decode(), ours)
            )
            written = held == ours.encode()
        elif self._last_sync_time >= max(time.monotonic() - _POLL_INTERVAL_S, 0):
            return None
        else:
            held = _call_store(
                lambda: self._store.get(_STATE_KEY) if self._store.check([_STATE_KEY]) else b""
            )
        try:
            self._state = self._accept_state(held)
            self._check_keys()
        except LaunchError as error:
            raise RendezvousStateError(str(error)) from error
        self._dirty = False
        self._last_sync_time = time.monotonic()
        self._sanitize()
        if self._state.round != self._round:
            self._round = self._state.round
            self.came.clear()
        self.came |= {node.addr for node in self._state.participants}
        return written

    def _check_keys(self) -> None:
        """Raise LaunchError if a node has noted in the store that it uses another secret key. After
        a complete rendezvous of all nodes, the note is ignored, so that an additional node cannot
        end the run.
        """
        self._met |= self._state.complete
        if not self._met and _call_store(
            lambda: b"1" if self._store.check([_REJECTED_KEY]) else b""
        ):
            raise LaunchError(
                "a node uses another rendezvous key",
                hint="set --rdzv-key FILE to equal files on all nodes",
            )

    def _accept_state(self, held: bytes) -> RendezvousState:
        """Return the state in `held`, the signed value from the store, and remember it as the
        latest state. Raise LaunchError if the signature is wrong or the state is older than the
        latest one.
        """
        if not held and not self._number:
            return RendezvousState()
        form = json.loads(self._signer.verified_value(_STATE_KEY, _decode_hex(held)))
        number = int(form["number"])
        if number < self._number or (number == self._number and held != self._held):
            hint = (
                "check whether another program can reach the port: see docs/reference/security.md"
            )
            raise LaunchError("the rendezvous store was reset to an earlier state", hint=hint)
        self._held = held
        self._number = number
        return _state_from_json(form)


def _call_store(ask: Callable[[], bytes]) -> bytes:
    """Return the result of `ask`, a function that reads or writes the store. Convert errors to
    elastic's RendezvousConnectionError.
    """
    try:
        return ask()
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError("the rendezvous store does not answer") from error


def _state_to_json(state: RendezvousState) -> dict[str, Any]:
    """Return elastic's rendezvous state as a JSON object."""
    return {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": None if state.deadline is None else state.deadline.isoformat(),
        "participants": [[*astuple(node), rank] for node, rank in state.participants.items()],
        "waiting": [*map(astuple, state.wait_list)],
        "redundant": [*map(astuple, state.redundancy_list)],
        "heartbeats": [
            [*astuple(node), at.isoformat()] for node, at in state.last_heartbeats.items()
        ],
    }


def _state_from_json(form: dict[str, Any]) -> RendezvousState:
    """Return elastic's rendezvous state, given the result of `_state_to_json`."""
    state = RendezvousState()
    state.round = form["round"]
    state.complete = form["complete"]
    state.closed = form["closed"]
    state.deadline = None if form["deadline"] is None else datetime.fromisoformat(form["deadline"])
    state.participants = {NodeDesc(*words): rank for *words, rank in form["participants"]}
    state.wait_list, state.redundancy_list = (
        {NodeDesc(*words) for words in form[name]} for name in ("waiting", "redundant")
    )
    state.last_heartbeats = {
        NodeDesc(*words): datetime.fromisoformat(at) for *words, at in form["heartbeats"]
    }
    return state
